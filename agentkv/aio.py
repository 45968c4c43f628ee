"""`AsyncAgentKVContext`: one conversation, asynchronously."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from agentkv.backends.base import AsyncBackend, Backend, Delta, Event, Request
from agentkv.conversation import Conversation
from agentkv.errors import ContextError
from agentkv.exchange import Exchange
from agentkv.inputs import Input, UserMessage
from agentkv.reply import Reply
from agentkv.surface import ContextSurface, as_inputs


async def _events(backend: Backend, request: Request) -> AsyncIterator[Event]:
    """Stream a backend's events; one without an asynchronous stream runs in a thread of its own."""
    if isinstance(backend, AsyncBackend):
        async for event in backend.astream(request):
            yield event
        return
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="agentkv-stream")
    events = backend.stream(request)
    try:
        while True:
            following: Event | None = await loop.run_in_executor(thread, _next, events)
            if following is None:
                break
            yield following
    finally:
        # The thread may be in the middle of a step: closing waits its turn there and blocks nobody here.
        thread.submit(_close, events)
        thread.shutdown(wait=False)


def _next(events: Iterator[Event]) -> Any:
    return next(events, None)


def _close(events: Iterator[Event]) -> None:
    close = getattr(events, "close", None)
    if close is not None:
        close()


class AsyncStream:
    """An answer while it is made: ``async for`` gives deltas, then read `reply`.

    The call begins when it is first iterated or entered, so that fields can be awaited. `aclose`,
    cancellation or an error discards the turn; `keep` records what has come. Leaving the iteration early
    needs one of the two: use ``async with``.
    """

    def __init__(self, conversation: Conversation, inputs: list[Input], sampling: dict[str, Any]) -> None:
        self._conversation = conversation
        self._asked = (inputs, sampling)
        self._exchange: Exchange | None = None
        self._events: AsyncIterator[Event] | None = None
        self._over = False

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return None if self._exchange is None else self._exchange.reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        events, exchange = await self._opened()
        if events is None:
            raise StopAsyncIteration
        try:
            async for event in events:
                delta = exchange.feed(event)
                if delta is not None:
                    return delta
                if exchange.reply is not None:
                    break  # what fails behind the completion cannot undo it
            exchange.ended()
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer."""
        events, exchange = await self._opened()
        if exchange.reply is None and events is not None:
            try:
                await _stop(events)
                exchange.keep()
            finally:
                await self.aclose()
        return exchange.ended()

    async def aclose(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept."""
        self._over = True
        events, self._events = self._events, None
        if events is not None:
            try:
                await _stop(events)
            finally:
                self._over_with_call()

    async def _opened(self) -> tuple[AsyncIterator[Event] | None, Exchange]:
        if self._exchange is None:
            if self._over:
                raise ContextError("the stream was closed before it began; ask for another")
            conversation, (inputs, sampling) = self._conversation, self._asked
            conversation.acquire()
            try:
                pulled = await conversation.sources.awaited()
                self._exchange = Exchange.plan(conversation, inputs, sampling, pulled)
                self._events = _events(conversation.backend, self._exchange.request)
            except BaseException:
                conversation.release()
                raise
        return self._events, self._exchange

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The event loop closes the generator; the context must not stay busy until then.
        if getattr(self, "_events", None) is not None:
            self._events = None
            self._over_with_call()

    def _over_with_call(self) -> None:
        if self._exchange is not None:
            self._exchange.drop()
        self._conversation.release()


async def _stop(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


class AsyncAgentKVContext(ContextSurface):
    """`AgentKVContext` for asynchronous programs: ``async with``, ``await ctx.ask``, ``async for``.

    Functions declared with `field` may be coroutine functions.
    """

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._conversation.enter)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversation.leave()

    async def ask(self, text: str, **sampling: Any) -> Reply:
        """Send what the user said, and return the whole answer; see `send`."""
        return await self.send(UserMessage(text), **sampling)

    async def send(self, *inputs: Input | str, **sampling: Any) -> Reply:
        """Send inputs and return the whole answer; arguments and errors as `AgentKVContext.send`.

        Cancelling the task stops the model and records nothing.
        """
        stream = self.stream(*inputs, **sampling)
        async for _ in stream:
            pass
        return await stream.keep()

    def stream(self, *inputs: Input | str, **sampling: Any) -> AsyncStream:
        """Send inputs and return the answer while it is made; it begins when it is first iterated."""
        return AsyncStream(self._conversation, as_inputs(inputs), sampling)
