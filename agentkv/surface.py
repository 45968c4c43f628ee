"""What both contexts offer beside the calls: declaring, changing, reporting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self, TypeVar

from agentkv.backends.base import Backend, SamplingOptions
from agentkv.conversation import ContextOptions, Conversation, effective_mode
from agentkv.costs import Costs
from agentkv.entries import RebaseReason
from agentkv.inputs import Input, UserMessage
from agentkv.ledger import Ledger
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.prompt import Prompt
from agentkv.report import SessionReport
from agentkv.segments import Deletion, Document, Field, Segment
from agentkv.sources import FieldSources, Pulled, with_fields
from agentkv.values import Granularity

_Function = TypeVar("_Function", bound=Callable[[], Any])


class ContextSurface:
    """One conversation of a prompt.

    Parameters
    ----------
    backend
        Runs the model; may be shared by contexts.
    segments
        `Policy`, `Tools`, `Skill`, `Document`, `Field`, or instances of `mutable_fields` classes.
    mode
        ``"on"``, ``"observe"`` or ``"off"``; the environment variable ``AGENTKV_MODE`` overrides it.
    options
        Further fields of `ContextOptions`: ``tenant``, ``salt_key``, ``profile``, ``sampling``, ``costs``,
        ``conversation``.

    Raises
    ------
    SegmentError, FieldError
        A declaration is wrong.
    ConfigurationError
        The mode is unknown.
    """

    def __init__(
        self,
        backend: Backend,
        segments: Iterable[Segment | object] = (),
        *,
        mode: Mode | str = Mode.ON,
        template_arguments: dict[str, Any] | None = None,
        tenant: str = "default",
        salt_key: bytes | None = None,
        profile: Profile = GENERIC,
        sampling: SamplingOptions | None = None,
        costs: Costs | None = None,
        conversation: str | None = None,
    ) -> None:
        options = ContextOptions(
            mode=effective_mode(mode),
            tenant=tenant,
            profile=profile,
            sampling=sampling or SamplingOptions(),
            costs=costs or Costs(),
        )
        if salt_key is not None:
            options = replace(options, salt_key=salt_key)
        if conversation is not None:
            options = replace(options, conversation=conversation)
        sources = FieldSources()
        prompt = Prompt.of(sources.declare(segments), template_arguments)
        self._conversation = Conversation(backend, prompt, sources, options, Ledger())

    @classmethod
    def resume(
        cls, backend: Backend, saved: str | Ledger, segments: Iterable[Segment | object] = (), **options: Any
    ) -> Self:
        """Go on with a conversation from its ledger, byte for byte.

        Parameters
        ----------
        saved
            A ledger, or what `Ledger.to_json` returned.
        segments, options
            As of the constructor; what differs from what was told is said in the next turn.

        Raises
        ------
        LedgerFormatError
            `saved` is no ledger.
        """
        context = cls(backend, segments, **options)
        ledger = saved if isinstance(saved, Ledger) else Ledger.from_json(saved)
        context._conversation.ledger = context._conversation._shadow = ledger
        return context

    @property
    def ledger(self) -> Ledger:
        """What the model was told: all that is needed to resume."""
        return self._conversation.ledger

    @property
    def report(self) -> SessionReport:
        """What the conversation cost so far."""
        return self._conversation.report

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        return self._conversation.mode

    @property
    def prompt(self) -> Prompt:
        """What is declared, with the values that were current when it was last read."""
        return self._conversation.sources.read(self._conversation.prompt)

    def field(
        self,
        key: str | None = None,
        *,
        label: str = "",
        unit: str | None = None,
        granularity: Granularity | None = None,
        sensitive: bool = False,
        critical: bool = False,
        depends_on: tuple[str, ...] = (),
    ) -> Callable[[_Function], _Function]:
        """Declare a function as a field that is read each turn and compared with what was told.

        Raises
        ------
        FieldError
            The key or label is malformed or taken.
        """

        def declare(function: _Function) -> _Function:
            name = key or function.__name__
            declared = Field(
                name,
                "",
                label=label,
                sensitive=sensitive,
                critical=critical,
                depends_on=depends_on,
            )
            prompt = with_fields(self._conversation.prompt, [declared])
            self._conversation.sources.pull(Pulled(name, function, unit, granularity))
            self._conversation.change(prompt)
            return function

        return declare

    def bind(self, obj: object, *, key: str | None = None, label: str | None = None) -> None:
        """Declare the fields of an object of a `mutable_fields` class.

        Parameters
        ----------
        key
            What the fields' keys begin with; by default the class's name in snake case.
        label
            Stands behind each field's label in brackets; by default the key's part after its last colon.

        Raises
        ------
        FieldError
            The key or a label is taken.
        """
        sources = self._conversation.sources.copy()
        prompt = with_fields(self._conversation.prompt, sources.bind(obj, key=key, label=label))
        self._conversation.sources = sources
        self._conversation.change(prompt)

    def unbind(self, key: str, deletion: Deletion | None = None) -> None:
        """Remove the fields of the object that is bound as `key`."""
        for name in self._conversation.sources.unbind(key):
            self._conversation.remove(name, deletion)

    def set(self, key: str, value: object) -> None:
        """Set a field by key; said as an erratum on the next turn.

        Raises
        ------
        FieldError
            There is no such field, or a function gives its value.
        ValueRenderError
            The value has no canonical text; the old value stays.
        """
        self._conversation.change(self._conversation.sources.set(self._conversation.prompt, key, value))

    def add(self, part: Segment) -> None:
        """Add a segment, tools or a field, or replace the segment of the same key."""
        prompt = self._conversation.prompt
        if isinstance(part, Field) and part.key not in prompt.fields:
            self._conversation.change(with_fields(prompt, [part]))
        else:
            self._conversation.change(prompt.with_part(part))

    def retrieve(self, documents: Iterable[Document]) -> None:
        """Declare the documents of a retrieval.

        New ones are appended and their order changes nothing; those that were retrieved before and are not
        now stay unused without a word.
        """
        wanted = list(documents)
        prompt = self._conversation.prompt
        keys = {document.key for document in wanted}
        for segment in prompt.segments:
            if isinstance(segment, Document) and segment.key not in keys:
                prompt = prompt.without(segment.key, Deletion.DORMANT)
        for document in wanted:
            prompt = prompt.with_part(document)
        self._conversation.change(prompt)

    def remove(self, key: str, deletion: Deletion | None = None) -> None:
        """Remove ``policy:NAME``, ``skill:NAME``, ``document:NAME``, ``tool:NAME`` or a field.

        `Deletion.HARD` redacts the ledger at once and opens a new epoch under a new salt.

        Raises
        ------
        SegmentError
            Nothing is called so.
        """
        self._conversation.remove(key, deletion)

    def set_template_arguments(self, **arguments: Any) -> None:
        """Set arguments of the chat template, such as ``enable_thinking``; other ones open a new epoch."""
        self._conversation.change(self._conversation.prompt.with_template_arguments(arguments))

    def rebase(self, *, summary: str | None = None, keep_last: int | None = None) -> None:
        """Open a new epoch with the next turn: current values in the prompt, no errata.

        Parameters
        ----------
        summary
            Stands for the turns that are left out. Values that are no longer true in it are corrected.
        keep_last
            User turns to keep; all by default.

        Raises
        ------
        ConfigurationError
            A summary without `keep_last`, or a negative `keep_last`.
        """
        carry = self._conversation.carry(summary, keep_last)
        self._conversation.ask_rebase(RebaseReason.REQUESTED, carry)

    def fork(self, *segments: Segment) -> Self:
        """Return a new context that goes on from here; what either says later never reaches the other.

        Parameters
        ----------
        segments
            Added to the child's prompt, such as a `Skill` that states its role. Its prompt still begins with
            the parent's ids.
        """
        parent = self._conversation
        options = replace(parent.options, conversation=ContextOptions().conversation, costs=parent.costs)
        child = self.__class__.__new__(self.__class__)
        child._conversation = Conversation(
            parent.backend, parent.prompt, parent.sources.copy(), options, parent.ledger
        )
        child._conversation._shadow = parent._shadow
        for segment in segments:
            child.add(segment)
        return child


def as_inputs(inputs: Iterable[Input | str]) -> list[Input]:
    """Return inputs in which plain text is what the user said."""
    return [UserMessage(item) if isinstance(item, str) else item for item in inputs]
