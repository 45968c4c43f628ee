"""What both contexts offer beside the calls: declaring, changing, reporting."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar, overload

from agentkv.backends.base import Backend, SamplingOptions
from agentkv.conversation import Conversation
from agentkv.costs import Costs
from agentkv.entries import RebaseReason
from agentkv.errors import ConfigurationError, MissingDependencyError, SegmentError
from agentkv.inputs import Input, UserMessage
from agentkv.ledger import Ledger
from agentkv.options import ContextOptions, effective_mode
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.prompt import Prompt
from agentkv.rebase import RebaseRequest
from agentkv.report import SessionReport
from agentkv.segments import Deletion, Document, Field, Segment, Splicing, member
from agentkv.sources import FieldSources, Pulled
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
        ``conversation``, ``routing_key``, ``splicing``.

    Raises
    ------
    SegmentError, FieldError
        A declaration is wrong.
    ConfigurationError
        There is no such mode, `backend` is none, or an option does not fit.
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
        routing_key: str = "",
        splicing: Splicing | str = Splicing.AUTO,
    ) -> None:
        if isinstance(backend, type) or not isinstance(backend, Backend):
            raise ConfigurationError(
                f"{backend!r} is no backend; give an instance of one, such as TransformersBackend"
            )
        if not isinstance(segments, Iterable):
            raise SegmentError(f"segments is a {type(segments).__name__}; give a list of segments")
        options = ContextOptions(
            mode=effective_mode(mode),
            tenant=tenant,
            profile=profile,
            sampling=SamplingOptions() if sampling is None else sampling,
            costs=Costs() if costs is None else costs,
            splicing=member(Splicing, splicing, "splicing"),
        )
        if salt_key is not None:
            options = replace(options, salt_key=salt_key)
        if conversation is not None:
            options = replace(options, conversation=conversation)
        if routing_key:
            options = replace(options, routing_key=routing_key)
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
        context._conversation.resume(ledger)
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
    def costs(self) -> Costs:
        """What was measured so far; another context on the backend can begin with it, as its ``costs=``."""
        return self._conversation.costs

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        return self._conversation.mode

    @property
    def prompt(self) -> Prompt:
        """What is declared, with the values that the last turn read or `set` gave.

        Functions and bound objects are read by turns only: before the first one, a bound object's fields
        have the values they were bound with, and those of functions are ``none``.
        """
        return self._conversation.prompt

    @overload
    def field(self, key: _Function, /) -> _Function: ...
    @overload
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
    ) -> Callable[[_Function], _Function]: ...
    def field(
        self,
        key: str | _Function | None = None,
        *,
        label: str = "",
        unit: str | None = None,
        granularity: Granularity | None = None,
        sensitive: bool = False,
        critical: bool = False,
        depends_on: tuple[str, ...] = (),
    ) -> _Function | Callable[[_Function], _Function]:
        """Declare a function as a field that is read each turn and compared with what was told.

        Parameters
        ----------
        key
            The field's key, by default the function's name; the decorator may stand without brackets too.
        label, unit, granularity, sensitive, critical, depends_on
            As of `Field`.

        Raises
        ------
        FieldError
            The key or label is malformed or taken.
        """

        def declare(function: _Function) -> _Function:
            name = key if isinstance(key, str) else function.__name__
            declared = Field(
                name,
                None,
                label=label,
                unit=unit,
                granularity=granularity,
                sensitive=sensitive,
                critical=critical,
                depends_on=depends_on,
            )
            self._conversation.pull(declared, Pulled(declared, function))
            return function

        return declare(key) if callable(key) else declare

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
        self._conversation.bind(obj, key, label)

    def unbind(self, key: str, deletion: Deletion | str | None = None) -> None:
        """Remove the fields of the object that is bound as `key`; all of them, or none if one cannot be.

        Raises
        ------
        FieldError
            No object is bound so.
        SegmentError, ContextBusyError, ConfigurationError
            As `remove`.
        """
        self._conversation.unbind(key, _deletion(deletion))

    def set(self, key: str, value: object) -> None:
        """Set a field by key; said as an erratum on the next turn.

        Raises
        ------
        FieldError
            There is no such field, or a function gives its value.
        ValueRenderError
            The value has no canonical text; the old value stays.
        """
        conversation = self._conversation
        conversation.change(lambda prompt: conversation.sources.set(prompt, key, value))

    def add(self, part: Segment) -> None:
        """Add a segment, tools or a field, or replace the segment of the same key.

        Raises
        ------
        SegmentError
            It shows a field that is not declared.
        FieldError
            A field's label is taken.
        """
        self._conversation.add([part])

    def retrieve(self, documents: Iterable[Document]) -> None:
        """Declare the documents of a retrieval.

        New ones are appended and their order changes nothing; those that were retrieved before and are not
        now stay unused without a word. Documents that were declared otherwise stay as they are.
        """
        self._conversation.retrieve(documents)

    def remove(self, key: str, deletion: Deletion | str | None = None) -> None:
        """Remove ``policy:NAME``, ``skill:NAME``, ``document:NAME``, ``tool:NAME`` or a field.

        `Deletion.HARD` redacts the ledger, and the summary of a rebase that is asked for, at once and opens
        a new epoch under a new salt.

        Raises
        ------
        SegmentError
            Nothing is called so, or a segment shows the field: change the segment first.
        ContextBusyError
            It is a hard deletion and a call is running.
        ConfigurationError
            There is no such kind of deletion.
        """
        self._conversation.remove(key, _deletion(deletion))

    def set_template_arguments(self, **arguments: Any) -> None:
        """Set arguments of the chat template, such as ``enable_thinking``; other ones open a new epoch."""
        self._conversation.change(lambda prompt: prompt.with_template_arguments(arguments))

    def rebase(self, *, summary: str | None = None, keep_last: int | None = None) -> None:
        """Open a new epoch with the next turn: current values in the prompt, no errata.

        What is kept is counted when that turn is planned, so an answer that is being made counts too.

        Parameters
        ----------
        summary
            Stands for everything before what is kept, an earlier summary included. Values that are no longer
            true in it are corrected. Without one, an earlier summary stays unless turns are left out.
        keep_last
            User turns to keep; all by default. Turns that an earlier summary replaced never come back, and a
            turn whose tool calls await their results is always kept.

        Raises
        ------
        ConfigurationError
            A summary without `keep_last`, a negative `keep_last`, or 0 while tool calls await their results.
        """
        self._conversation.ask_rebase(RebaseRequest(RebaseReason.REQUESTED, summary, keep_last))

    def fork(self, *segments: Segment) -> Self:
        """Return a new context that goes on from here; what either says later never reaches the other.

        A bound object is one and the same for both, as it is what is true: both are told its changes. Fields
        that are set by key belong to each alone.

        Parameters
        ----------
        segments
            Added to the child's prompt, such as a `Skill` that states its role. Its prompt still begins with
            the parent's ids.
        """
        child = self._of(self._conversation.fork())
        child._conversation.add(segments)
        return child

    def wrap(self, model: Any = None, **options: Any) -> Any:
        """Return a LangChain chat model that tells what changes in this context, for any Runnable or graph.

        It has the context's segments, fields, profile, mode and tenant, read anew at every call. Ledgers are
        kept for each ``thread_id``; the context's own conversation is left alone, and need not be open.

        Parameters
        ----------
        model
            A chat model; None takes this context's backend.
        options
            Further arguments of ``langchain_agentkv.wrap``, such as ``ledger_store``.

        Raises
        ------
        MissingDependencyError
            langchain-agentkv is not installed.
        ConfigurationError
            It is no chat model, such as a compiled graph, or the context declares tools: they belong to the
            model.
        CapabilityError
            The context has a tenant, and the model cannot keep tenants apart.
        """
        return _langchain().wrap_model(self._conversation, model, **options)

    def create_agent(self, model: Any = None, tools: Sequence[Any] | None = None, **agent: Any) -> Any:
        """Return a LangChain agent that tells what changes in this context.

        Parameters
        ----------
        model
            A chat model or its name; None takes this context's backend.
        tools, agent
            As of ``langchain.agents.create_agent``; agentkv's middleware comes last. ``fields=`` adds fields
            of LangChain's own sources, such as the graph's state.

        Errors are those of `wrap`.
        """
        return _langchain().create_context_agent(self._conversation, model, tools, **agent)

    def _of(self, conversation: Conversation) -> Self:
        made = self.__class__.__new__(self.__class__)
        made._conversation = conversation
        return made


def _langchain() -> Any:
    try:
        return importlib.import_module("langchain_agentkv.contexts")
    except MissingDependencyError:
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"LangChain models and agents need langchain-agentkv ({error}): "
            "pip install 'langchain-agentkv[agents]'"
        ) from error


def _deletion(deletion: Deletion | str | None) -> Deletion | None:
    try:
        return None if deletion is None else Deletion(deletion)
    except ValueError:
        known = ", ".join(Deletion)
        raise ConfigurationError(f"deletion {deletion!r} is unknown; use one of {known}") from None


def as_inputs(inputs: Iterable[Input | str]) -> list[Input]:
    """Return inputs in which plain text is what the user said."""
    return [UserMessage(item) if isinstance(item, str) else item for item in inputs]
