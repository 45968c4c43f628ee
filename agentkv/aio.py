"""`AsyncAgentKVContext`: one conversation, asynchronously."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from agentkv.backends.base import AsyncBackend, Backend, Delta, Event, Request
from agentkv.conversation import Conversation, Exchange, sampling_of
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
        while (event := await loop.run_in_executor(thread, _next, events)) is not None:
            yield event
    finally:
        # The thread may be in the middle of a step: closing waits its turn there and blocks nobody here.
        thread.submit(_close, events)
        thread.shutdown(wait=False)


def _next(events: Iterator[Event]) -> Event | None:
    return next(events, None)


def _close(events: Iterator[Event]) -> None:
    close = getattr(events, "close", None)
    if close is not None:
        close()


class AsyncStream:
    """An answer while it is made: ``async for`` gives deltas, then read `reply`.

    `aclose`, cancellation or an error discards the turn; `keep` records what has come. Leaving the iteration
    early needs one of the two: use ``async with``.
    """

    def __init__(self, conversation: Conversation, exchange: Exchange) -> None:
        self._conversation = conversation
        self._exchange = exchange
        self._events: AsyncIterator[Event] | None = _events(conversation.backend, exchange.request)

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return self._exchange.reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._events is None:
            raise StopAsyncIteration
        try:
            async for event in self._events:
                delta = self._exchange.feed(event)
                if delta is not None:
                    return delta
            self._exchange.ended()
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer."""
        if self._exchange.reply is None and self._events is not None:
            try:
                await self._stop()
                self._exchange.keep()
            finally:
                await self.aclose()
        return self._exchange.ended()

    async def aclose(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept."""
        if self._events is not None:
            try:
                await self._stop()
            finally:
                self._events = None
                self._conversation.release()

    async def _stop(self) -> None:
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Opening:
    """A stream that opens when it is first iterated or entered, so that fields can be awaited."""

    def __init__(self, context: AsyncAgentKVContext, inputs: list[Input], sampling: dict[str, Any]) -> None:
        self._arguments = (context, inputs, sampling)
        self._stream: AsyncStream | None = None

    async def _opened(self) -> AsyncStream:
        if self._stream is None:
            context, inputs, sampling = self._arguments
            self._stream = await context._open(inputs, sampling)
        return self._stream

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return None if self._stream is None else self._stream.reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await (await self._opened()).__anext__()

    async def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer."""
        return await (await self._opened()).keep()

    async def aclose(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept."""
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


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
        stream = await self._open(as_inputs(inputs), sampling)
        async for _ in stream:
            pass
        return stream._exchange.ended()

    def stream(self, *inputs: Input | str, **sampling: Any) -> _Opening:
        """Send inputs and return the answer while it is made; it begins when it is first iterated."""
        return _Opening(self, as_inputs(inputs), sampling)

    async def _open(self, inputs: list[Input], sampling: dict[str, Any]) -> AsyncStream:
        conversation = self._conversation
        conversation.acquire()
        try:
            options = sampling_of(conversation.options.sampling, sampling)
            pulled = await conversation.sources.awaited()
            return AsyncStream(conversation, conversation.exchange(inputs, options, pulled))
        except BaseException:
            conversation.release()
            raise
