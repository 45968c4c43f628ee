"""What the sync and the async context share: one conversation's state between calls."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from agentkv.backends.base import (
    Backend,
    Completion,
    Request,
    SamplingOptions,
)
from agentkv.costs import Costs
from agentkv.entries import Message, RebaseReason
from agentkv.errors import (
    AgentKVError,
    BackendError,
    CapabilityError,
    ConfigurationError,
    ContextBusyError,
    ContextClosedError,
    ContextError,
)
from agentkv.inputs import Input, ToolResult
from agentkv.ledger import Ledger
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.prompt import Prompt
from agentkv.render import Carry
from agentkv.reply import Reply, make_reply, refusals
from agentkv.report import SessionReport
from agentkv.salts import process_key, salt
from agentkv.segments import Deletion
from agentkv.sources import FieldSources
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn, begin, finish

MODE_VARIABLE: Final = "AGENTKV_MODE"
"""Environment variable that overrides every context's mode; ``off`` is the kill switch."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context behaves; the keyword arguments of its constructor."""

    mode: Mode = Mode.ON
    tenant: str = "default"
    """Whose conversation it is; prefix caches are never shared between tenants."""
    salt_key: bytes = field(default_factory=process_key, repr=False)
    """Secret of at least 16 bytes that salts are made with."""
    profile: Profile = GENERIC
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    costs: Costs = field(default_factory=Costs)
    conversation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Stable id: where KV is kept, and the routing key on servers."""


def effective_mode(asked: Mode | str) -> Mode:
    """Return the mode to use: the environment's, if it names one.

    Raises
    ------
    ConfigurationError
        There is no such mode.
    """
    named = os.environ.get(MODE_VARIABLE, "").strip().lower() or asked
    try:
        return Mode(named)
    except ValueError:
        known = ", ".join(Mode)
        raise ConfigurationError(f"mode {named!r} is unknown; use one of {known}") from None


class Conversation:
    """The state of a conversation, and the steps that both contexts take."""

    def __init__(
        self, backend: Backend, prompt: Prompt, sources: FieldSources, options: ContextOptions, ledger: Ledger
    ) -> None:
        self.backend = backend
        self.prompt = prompt
        self.sources = sources
        self.options = options
        self.ledger = ledger
        self.costs = options.costs
        self.report = SessionReport()
        self.mode = options.mode
        self._shadow = ledger
        self._traits: ModelTraits | None = None
        self._rebase: tuple[RebaseReason, Carry | None] | None = None
        self._busy = threading.Lock()

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

    def leave(self) -> None:
        """Release what the backend keeps for the conversation."""
        if self._traits is not None:
            self._traits = None
            self.backend.release(self.options.conversation)

    @property
    def entered(self) -> bool:
        """Whether the context is between entering and leaving."""
        return self._traits is not None

    def change(self, prompt: Prompt) -> None:
        """Declare another prompt, effective from the next turn on."""
        self.prompt = prompt

    def remove(self, key: str, deletion: Deletion | None) -> None:
        """Remove a segment, tool or field; a hard deletion redacts the ledger at once.

        Raises
        ------
        ContextBusyError
            It is a hard deletion and a call is running, whose record would bring back what is erased.
        """
        if deletion is not Deletion.HARD:
            self._forget(key, deletion)
            return
        self._take()
        try:
            self._forget(key, deletion)
            self.ledger = self.ledger.erase(key)
            self._shadow = self._shadow.erase(key)
            self.report = replace(self.report, last=None)
            self.backend.release(self.options.conversation)
        finally:
            self.release()

    def _forget(self, key: str, deletion: Deletion | None) -> None:
        self.prompt = self.prompt.without(key, deletion)
        self.sources.forget(key)

    def ask_rebase(self, reason: RebaseReason, carry: Carry | None) -> None:
        """Open a new epoch with the next turn."""
        self._rebase = (reason, carry)

    def carry(self, summary: str | None, keep_last: int | None) -> Carry | None:
        """Return what a rebase takes along.

        Raises
        ------
        ConfigurationError
            `keep_last` is negative, or a summary does not say how much it replaces.
        """
        if keep_last is None:
            if summary is not None:
                raise ConfigurationError(
                    "a summary needs keep_last: how many of the last user turns stay as they are"
                )
            return None
        if keep_last < 0:
            raise ConfigurationError(f"keep_last is {keep_last}; give 0 or more user turns")
        if keep_last == 0 and self.ledger.state.open_calls:
            raise ConfigurationError(
                "keep_last is 0 while tool calls await their results: keep 1 turn, or send the results first"
            )
        entries = list(self.ledger)
        users = [i for i, entry in enumerate(entries) if isinstance(entry, Message) and entry.role == "user"]
        if keep_last >= len(users):
            return Carry(0, summary)
        return Carry(users[-keep_last] if keep_last else len(entries), summary)

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

    def plan_turn(
        self, inputs: Iterable[Input], sampling: SamplingOptions, pulled: Mapping[str, object] | None
    ) -> tuple[PendingTurn, PendingTurn | None]:
        """Plan a turn, and in mode ``observe`` the one that agentkv would have made; nothing is changed."""
        if self._traits is None:
            raise ContextClosedError("the context is not open: use it inside its with block")
        prompt = self.sources.read(self.prompt, pulled)
        given = self._with_refusals(list(inputs))
        reason, carry = self._rebase or (None, None)
        mode = Mode.ON if self.mode is Mode.ON else Mode.OFF
        pending = begin(
            prompt,
            given,
            self.ledger,
            self._traits,
            self.costs,
            room=sampling.max_tokens,
            mode=mode,
            rebase=reason,
            carry=carry,
        )
        shadow = self._shadow_turn(prompt, given, sampling) if self.mode is Mode.OBSERVE else None
        return pending, shadow

    def _with_refusals(self, inputs: list[Input]) -> list[Input]:
        last = self.ledger.state.generated
        if last is None:
            return inputs
        given = {item.call_id for item in inputs if isinstance(item, ToolResult)}
        open_ids = {call.id for call in self.ledger.state.open_calls}
        refused = [r for r in refusals(last) if r.call_id not in given and r.call_id in open_ids]
        return [*refused, *inputs]

    def _shadow_turn(
        self, prompt: Prompt, inputs: Iterable[Input], sampling: SamplingOptions
    ) -> PendingTurn | None:
        if self._traits is None:
            return None
        try:
            return begin(
                prompt, inputs, self._shadow, self._traits, self.costs, room=sampling.max_tokens, mode=Mode.ON
            )
        except AgentKVError:
            return None

    def request(self, pending: PendingTurn, sampling: SamplingOptions) -> Request:
        """Return what to ask of the backend."""
        frozen = pending.frozen
        return Request(
            ids=pending.ids,
            conversation=self.options.conversation,
            salt=salt(
                self.options.salt_key,
                tenant=self.options.tenant,
                namespace=frozen.namespace,
                generation=frozen.generation,
            ),
            options=sampling,
            tools=frozen.tools,
        )

    def commit(
        self, pending: PendingTurn, shadow: PendingTurn | None, completion: Completion, *, stopped: bool
    ) -> Reply:
        """Record a turn that was told and answered."""
        counted = self.backend.capabilities.cached_counts and not stopped
        ledger, report = finish(
            pending,
            completion,
            stopped=stopped,
            cached_counts=counted,
            would_have_cached_tokens=None if shadow is None else shadow.predicted_cached_tokens,
        )
        if shadow is not None:
            usage = replace(completion.usage, prompt_tokens=len(shadow.ids))
            self._shadow, _ = finish(shadow, replace(completion, usage=usage), stopped=stopped)
        self.ledger = ledger
        self._rebase = None
        self.report = self.report.add(report)
        if not stopped:
            self.costs = self.costs.observe(completion)
        answer = ledger.state.generated
        if answer is None:  # pragma: no cover - finish always records an answer
            raise BackendError("the answer was not recorded")
        return make_reply(answer, report, completion.finish_reason)


def sampling_of(base: SamplingOptions, changes: Mapping[str, Any]) -> SamplingOptions:
    """Return sampling options with some changed by name.

    Raises
    ------
    ConfigurationError
        There is no such option.
    """
    if not changes:
        return base
    try:
        return replace(base, **changes)
    except TypeError as error:
        known = ", ".join(SamplingOptions.__dataclass_fields__)
        raise ConfigurationError(f"unknown sampling option ({error}); options are: {known}") from error
