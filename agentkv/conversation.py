"""What the sync and the async context share: one conversation's state between calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from agentkv.backends.base import (
    Backend,
    Completion,
    Request,
    SamplingOptions,
)
from agentkv.encode import Encoding, choose_encoding
from agentkv.errors import (
    AgentKVError,
    BackendError,
    CapabilityError,
    ConfigurationError,
    ContextBusyError,
    ContextClosedError,
    ContextError,
)
from agentkv.inputs import Input, in_words
from agentkv.ledger import Ledger
from agentkv.options import ContextOptions
from agentkv.outcome import finish
from agentkv.plan import Mode
from agentkv.planned import NO_TOOLS, PlannedTurn, salted, with_refusals
from agentkv.prompt import Lint, Prompt, checked_change
from agentkv.rebase import RebaseRequest
from agentkv.reply import Reply, make_reply
from agentkv.report import SessionReport
from agentkv.salts import salt
from agentkv.segments import Deletion, Document, Field, Segment
from agentkv.sources import FieldSources, Pulled, with_fields
from agentkv.splicing import shelf_of
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn, begin

_LOG: Final = logging.getLogger("agentkv")


class Conversation:
    """The state of a conversation, and the steps that both contexts take.

    One call runs at a time. What is declared can be changed from any thread, also while a call runs.
    """

    def __init__(
        self, backend: Backend, prompt: Prompt, sources: FieldSources, options: ContextOptions, ledger: Ledger
    ) -> None:
        self.backend = backend
        self.prompt = prompt
        """What is declared, with the values that were last read."""
        self.sources = sources
        self.options = options
        self.ledger = ledger
        self.costs = options.costs
        self.report = SessionReport()
        self.mode = options.mode
        self._shadow = ledger
        self._traits: ModelTraits | None = None
        self._rebase: RebaseRequest | None = None
        self._retrieved: frozenset[str] = frozenset()
        self._busy = threading.Lock()
        self._state = threading.RLock()

    def enter(self) -> None:
        """Check what the backend can do.

        Raises
        ------
        CapabilityError
            It cannot run this conversation.
        """
        able = self.backend.capabilities
        if able.context_window <= self.options.sampling.max_tokens:
            raise CapabilityError(
                f"backend {able.name!r} has a context window of {able.context_window} tokens, but answers "
                f"may take {self.options.sampling.max_tokens}: lower max_tokens"
            )
        if not able.salts and self.options.tenant != "default":
            raise CapabilityError(
                f"backend {able.name!r} does not keep salts apart, so tenant {self.options.tenant!r} could "
                "read from another tenant's cache by its timing: use a backend that salts"
            )
        self.prompt.check()
        if self._traits is not None:
            raise ContextError("the context is open already: leave it first, or fork it")
        self._traits = ModelTraits(
            self.backend.tokenizer, able, self.options.profile, today=datetime.now(UTC).date()
        )
        for finding in self.prompt.lint():
            if finding.lint is Lint.LITERAL_PLACEHOLDER:
                _LOG.warning("%s", finding.message)
        encoder = self._traits.encoder(self.prompt.template_arguments)
        if choose_encoding(encoder) is Encoding.MESSAGES and able.known_ids:
            _LOG.warning(
                "the chat template is not prefix-stable (%s): little can be saved with it",
                encoder.traits.breaks_at,
            )

    def leave(self) -> None:
        """Release what the backend keeps for the conversation."""
        if self._traits is not None:
            self._traits = None
            self.backend.release(self.options.conversation)

    def resume(self, ledger: Ledger) -> None:
        """Go on from a stored ledger."""
        with self._state:
            self.ledger = self._shadow = ledger

    def fork(self) -> Conversation:
        """Return a conversation that goes on from the last answer, a rebase that is asked for included."""
        with self._state:
            options = replace(
                self.options,
                conversation=ContextOptions().conversation,
                routing_key=self.routing_key,
                costs=self.costs,
            )
            made = Conversation(self.backend, self.prompt, self.sources.copy(), options, self.ledger)
            made._shadow, made._rebase, made._retrieved = self._shadow, self._rebase, self._retrieved
            return made

    @property
    def routing_key(self) -> str:
        """What keeps the conversation and its forks on one replica."""
        return self.options.routing_key or self.options.conversation

    def change(self, function: Callable[[Prompt], Prompt]) -> None:
        """Declare another prompt, effective from the next turn on; no other thread's change is lost."""
        with self._state:
            self.prompt = function(self.prompt)

    def add(self, parts: Iterable[Segment]) -> None:
        """Add segments, tools and fields, or replace those of the same keys; all of them or none."""
        given = list(parts)
        with self._state:
            prompt = self.prompt
            for part in given:
                if isinstance(part, Field) and part.key not in prompt.fields:
                    prompt = with_fields(prompt, [part])
                else:
                    prompt = prompt.with_part(part)
            self.prompt = checked_change(self.prompt, prompt)
            self._retrieved -= {part.key for part in given if isinstance(part, Document)}

    def retrieve(self, documents: Iterable[Document]) -> None:
        """Declare the documents of a retrieval instead of those of the last one."""
        wanted = {document.key: document for document in documents}
        with self._state:
            prompt = self.prompt
            declared = {segment.key for segment in prompt.segments}
            for key in sorted(self._retrieved & declared - wanted.keys()):
                prompt = prompt.without(key, Deletion.DORMANT)
            for document in wanted.values():
                prompt = prompt.with_part(document)
            self.prompt = checked_change(self.prompt, prompt)
            self._retrieved = frozenset(wanted.keys() - (declared - self._retrieved))

    def bind(self, obj: object, key: str | None, label: str | None) -> None:
        """Declare the fields of an object."""
        with self._state:
            sources = self.sources.copy()
            self.prompt = with_fields(self.prompt, sources.bind(obj, key=key, label=label))
            self.sources = sources

    def pull(self, field: Field, pulled: Pulled) -> None:
        """Declare a field that a function gives."""
        with self._state:
            prompt = with_fields(self.prompt, [field])
            self.sources.pull(pulled)
            self.prompt = prompt

    def remove(self, key: str, deletion: Deletion | None) -> None:
        """Remove a segment, tool or field; a hard deletion redacts the ledger at once.

        Raises
        ------
        SegmentError
            Nothing is called so, or a segment shows the field. Nothing was changed.
        ContextBusyError
            It is a hard deletion and a call is running, whose record would bring back what is erased.
        """
        with self._erasing(deletion), self._state:
            before = self.prompt
            self.prompt = checked_change(before, before.without(key, deletion))
            self.sources.forget(key)
            self._retrieved -= {key}
            self._erase((key,), before, deletion)

    def unbind(self, key: str, deletion: Deletion | None) -> None:
        """Remove the fields of a bound object, all of them or none; those removed before stay so.

        Raises
        ------
        FieldError
            No object is bound so.
        SegmentError, ContextBusyError
            As `remove`.
        """
        with self._erasing(deletion), self._state:
            names = self.sources.names(key)
            before = prompt = self.prompt
            for name in names:
                if name in prompt.fields:
                    prompt = prompt.without(name, deletion)
            self.prompt = checked_change(before, prompt)
            self.sources.unbind(key)
            self._erase(names, before, deletion)

    @contextmanager
    def _erasing(self, deletion: Deletion | None) -> Iterator[None]:
        """Keep calls out while a hard deletion rewrites the record; other ones need no such thing."""
        if deletion is not Deletion.HARD:
            yield
            return
        self._take()
        try:
            yield
            self.backend.release(self.options.conversation)
        finally:
            self.release()

    def _erase(self, keys: Sequence[str], before: Prompt, deletion: Deletion | None) -> None:
        if deletion is not Deletion.HARD:
            return
        if self._rebase is not None:
            current = {key: before.fields[key].text for key in keys if key in before.fields}
            self._rebase = self._rebase.erased(self.ledger, keys, current)
        self.ledger = self.ledger.erase(*keys)
        self._shadow = self._shadow.erase(*keys)
        self.report = replace(self.report, last=None)

    def ask_rebase(self, request: RebaseRequest) -> None:
        """Open a new epoch with the next turn.

        Raises
        ------
        ConfigurationError
            It keeps no turn while tool calls await their results.
        """
        with self._state:
            if request.keep_last == 0 and self.ledger.state.open_calls:
                raise ConfigurationError(
                    "keep_last is 0 while tool calls await their results: keep 1 turn, or send the results "
                    "first"
                )
            self._rebase = request

    def acquire(self) -> None:
        """Begin a call.

        Raises
        ------
        ContextClosedError
            The context is not entered.
        ContextBusyError
            Another call is running.
        """
        if self._traits is None:
            raise ContextClosedError("the context is not open: use it inside its with block")
        self._take()

    def _take(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise ContextBusyError(
                "a call is running on this context: wait for it, close its stream, or fork the context"
            )

    def release(self) -> None:
        """End a call."""
        self._busy.release()

    def read(self, pulled: Mapping[str, object] | None = None) -> Prompt:
        """Read the current values and return the prompt with them; `pulled` are those that were awaited."""
        texts = self.sources.texts(self.prompt, pulled)
        with self._state:
            self.prompt = self.prompt.with_texts(
                {key: text for key, text in texts.items() if key in self.prompt.fields}
            )
            return self.prompt

    def plan_turn(self, prompt: Prompt, inputs: Iterable[Input], sampling: SamplingOptions) -> PlannedTurn:
        """Plan a turn, and in mode ``observe`` the one that agentkv would have made; nothing is changed."""
        with self._state:
            ledger, shadow, traits, request = self.ledger, self._shadow, self._traits, self._rebase
        if traits is None:
            raise ContextClosedError("the context is not open: use it inside its with block")
        given = with_refusals(list(inputs), ledger)
        if sampling.tool_choice == NO_TOOLS and (prompt.tools or ledger.state.tools):
            given = in_words(given)

        options = self.options
        shelf = None
        if self.mode is Mode.ON:
            shelf = shelf_of(self.backend, options.tenant, options.splicing)

        def planned(ledger: Ledger, mode: Mode) -> PendingTurn:
            turn = begin(
                prompt,
                given,
                ledger,
                traits,
                self.costs,
                room=sampling.max_tokens,
                mode=mode,
                rebase=None if request is None else request.reason,
                carry=None if request is None else request.carry(ledger),
                shelf=shelf,
            )
            return salted(turn, self._salt(turn))

        turn = planned(ledger, Mode.ON if self.mode is Mode.ON else Mode.OFF)
        observed: PendingTurn | None = None
        if self.mode is Mode.OBSERVE:
            # What would have failed has nothing to report; `commit` begins anew from the real ledger.
            with suppress(AgentKVError):
                observed = planned(shadow, Mode.ON)
        return PlannedTurn(turn, observed, ledger, traits, request, sampling.tool_choice != NO_TOOLS)

    def request(self, pending: PendingTurn, sampling: SamplingOptions) -> Request:
        """Return what to ask of the backend."""
        frozen = pending.frozen
        return Request(
            ids=pending.ids,
            conversation=self.options.conversation,
            salt=self._salt(pending),
            options=sampling,
            tools=tuple(tool.schema for tool in pending.prompt.tools),
            rendered_tools=frozen.tools,
            messages=pending.messages,
            template_arguments=frozen.template_arguments,
            expected_cached_tokens=pending.predicted_cached_tokens,
            routing_key=self.routing_key,
            tenant=self.options.tenant,
            splices=tuple(item.splice for item in pending.layout.placed),
        )

    def _salt(self, pending: PendingTurn) -> str:
        frozen = pending.frozen
        return salt(
            self.options.salt_key,
            tenant=self.options.tenant,
            namespace=frozen.namespace,
            generation=frozen.generation,
        )

    def check_open(self, planned: PlannedTurn) -> None:
        """Raise `ContextClosedError` if the block in which the turn was planned was left."""
        if self._traits is not planned.traits:
            raise ContextClosedError("the context was left while it answered; nothing was recorded")

    def commit(self, planned: PlannedTurn, completion: Completion, *, stopped: bool) -> Reply:
        """Record a turn that was told and answered.

        Raises
        ------
        ContextClosedError
            The context was left meanwhile.
        ContextError
            The conversation went on meanwhile.
        TruncationDetectedError
            The server read fewer prompt tokens than were sent.
        """
        shadow = planned.shadow
        ledger, report = finish(
            planned.turn,
            completion,
            stopped=stopped,
            calls=planned.calls,
            cached_counts=self.backend.capabilities.cached_counts and completion.counted and not stopped,
            would_have_cached_tokens=None if shadow is None else shadow.predicted_cached_tokens,
        )
        observed = ledger
        if shadow is not None:
            usage = replace(completion.usage, prompt_tokens=len(shadow.ids))
            observed, _ = finish(
                shadow, replace(completion, usage=usage), stopped=stopped, calls=planned.calls
            )
        answer = ledger.state.generated
        if answer is None:  # pragma: no cover - finish always records an answer
            raise BackendError("the answer was not recorded")
        with self._state:
            self.check_open(planned)
            if self.ledger is not planned.ledger:
                raise ContextError(
                    "the conversation went on while this call was answered; nothing was recorded, ask again"
                )
            self.ledger, self._shadow = ledger, observed
            if self._rebase is planned.rebase:
                self._rebase = None
            self.report = self.report.add(report)
            if not stopped:
                self.costs = self.costs.observe(completion)
        return make_reply(answer, report, completion.finish_reason)
