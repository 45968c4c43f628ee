"""Every call as it was made: what was sent under which salt and when, and what came back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from agentkv.backends.base import (
    AsyncBackend,
    Backend,
    Capabilities,
    Completion,
    Delta,
    Event,
    Request,
    Usage,
)
from agentkv.tokenizer import ChatTokenizer
from agentkv.tokens import TokenIds
from agentkv.turn import predict_cached

_CALLS: Final[ContextVar[list[Call] | None]] = ContextVar("calls", default=None)


@dataclass(slots=True, eq=False)
class Call:
    """One call; it is filled in while it runs."""

    salt: str
    ids: TokenIds = field(repr=False)
    """The prompt, as it was sent."""
    expected: int
    """Cached tokens that the sender predicted from its own history."""
    sent: float
    """By `time.perf_counter`, as the others."""
    first: float | None = None
    """When the first token came."""
    done: float | None = None
    """When the answer was whole; None if it failed."""
    answer: tuple[int, ...] = field(default=(), repr=False)
    usage: Usage | None = None

    @property
    def sequence(self) -> TokenIds:
        """Prompt and answer."""
        return self.ids.extend(self.answer)

    def known(self, at: float) -> tuple[TokenIds, int]:
        """Return the ids that a later call may share at a time, and how many of them have KV."""
        if self.done is None or self.done > at:
            return self.ids, len(self.ids)
        # The last sampled token has no KV.
        return self.sequence, len(self.ids) + max(0, len(self.answer) - 1)


class Recorder:
    """A backend that notes what another one is asked and answers.

    Calls are kept in the order of sending; `calls_of` gives those of the running task alone.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.calls: Final[list[Call]] = []

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self._backend.capabilities

    @property
    def tokenizer(self) -> ChatTokenizer:
        """That of the backend."""
        return self._backend.tokenizer

    def release(self, conversation: str) -> None:
        """Forget what is kept for a conversation."""
        self._backend.release(conversation)

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one call."""
        call = self._begin(request)
        for event in self._backend.stream(request):
            _note(call, event)
            yield event

    async def astream(self, request: Request) -> AsyncIterator[Event]:
        """Run one call asynchronously, if the backend can."""
        if not isinstance(self._backend, AsyncBackend):
            for event in self.stream(request):
                yield event
            return
        call = self._begin(request)
        async for event in self._backend.astream(request):
            _note(call, event)
            yield event

    def _begin(self, request: Request) -> Call:
        call = Call(request.salt, request.ids, request.expected_cached_tokens, perf_counter())
        self.calls.append(call)
        noted = _CALLS.get()
        if noted is not None:
            noted.append(call)
        return call


def calls_here() -> list[Call]:
    """Return the list that calls of the running task are added to from now on."""
    calls: list[Call] = []
    _CALLS.set(calls)
    return calls


def _note(call: Call, event: Event) -> None:
    now = perf_counter()
    if isinstance(event, Delta):
        if event.ids or event.text:
            call.first = call.first or now
        return
    call.first = call.first or now
    call.answer, call.usage, call.done = event.ids or (), event.usage, now


async def finished(events: AsyncIterator[Event]) -> Completion:
    """Run a call to its end; raises RuntimeError if it gave no completion."""
    found: Completion | None = None
    async for event in events:
        if isinstance(event, Completion):
            found = event
    if found is None:
        raise RuntimeError("a call ended without a completion")
    return found


def rule(call: Call, earlier: Iterable[Call], block: int) -> int:
    """Return the cached tokens of a call by the rule of paged prefix caches, over all that was sent before.

    Parameters
    ----------
    earlier
        Calls that were sent before, of any salt. Those that still ran then count with their whole prompt,
        which a server may not have computed yet: the most that can be cached.
    block
        Tokens of a block.
    """
    most = 0
    for other in earlier:
        if other.salt != call.salt or other is call:
            continue
        ids, computed = other.known(call.sent)
        common = call.ids.common_prefix(ids)
        most = max(most, predict_cached(common, computed, len(call.ids), block))
    return most
