"""`AsyncAgentKVContext`: one conversation, asynchronously."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self

from agentkv.backends.base import AsyncBackend, Backend, Delta, Event, Request
from agentkv.conversation import Conversation
from agentkv.errors import ContextError
from agentkv.exchange import Exchange, Steps
from agentkv.fanout import branches, warming
from agentkv.fanout import warm as compute_shared
from agentkv.inputs import Input, UserMessage
from agentkv.prompt import Prompt
from agentkv.reply import Reply
from agentkv.surface import ContextSurface, as_inputs


async def _events(backend: Backend, request: Request) -> AsyncIterator[Event]:
    """Stream a backend's events; one without an asynchronous stream runs in a thread of its own."""
    if isinstance(backend, AsyncBackend):
        native = backend.astream(request)
        try:
            async for event in native:
                yield event
        finally:
            await _stop(native)  # left to the event loop, the call would end some time later
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
        self._held = False
        self._steps = Steps()

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return None if self._exchange is None else self._exchange.reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._steps.begin():
            self._begun()
            raise StopAsyncIteration
        delta: Delta | None = None
        over = True
        try:
            exchange = await self._opened()
            if not self._steps.over:
                delta = await self._advance(exchange)
        except Exception:
            if not self._steps.over:
                raise
            # It was closed from elsewhere: what fails then is nobody's concern.
        finally:
            over = self._steps.end(more=delta is not None)
            if over:
                await self._finish()
        if delta is None or over:
            raise StopAsyncIteration
        return delta

    async def _advance(self, exchange: Exchange) -> Delta | None:
        if self._events is not None:
            async for event in self._events:
                delta = exchange.feed(event)
                if delta is not None:
                    return delta
                if exchange.reply is not None:
                    break  # what fails behind the completion cannot undo it
        exchange.ended()
        return None

    async def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer; errors as `Stream.keep`."""
        if self._steps.begin():
            try:
                exchange = await self._opened()
                if self._events is not None:
                    await _stop(self._events)
                exchange.keep()
            finally:
                self._steps.end(more=False)
                await self._finish()
        return self._begun().ended()

    async def aclose(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept.

        From another task than the one that waits for the next delta, the model is stopped once it gives one;
        the iteration then ends, and the context is busy until it has. Cancelling that task stops it at once.
        """
        if self._steps.stop():
            await self._finish()

    def _begun(self) -> Exchange:
        if self._exchange is None:
            raise ContextError(
                "the stream ended before it began: it was closed, or its call failed; ask for another"
            )
        return self._exchange

    async def _opened(self) -> Exchange:
        if self._exchange is None:
            conversation = self._conversation
            conversation.acquire()
            self._held = True
            pulled = await conversation.sources.awaited()
            self._exchange = await self._planned(conversation.read(pulled))
            self._events = _events(conversation.backend, self._exchange.request)
        return self._exchange

    async def _planned(self, prompt: Prompt) -> Exchange:
        """Plan in a thread: a long prompt takes a while to encode, and the event loop goes on."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="agentkv-plan")
        plan = partial(Exchange.plan, self._conversation, prompt, *self._asked, self._steps)
        planning: Future[Exchange] = thread.submit(copy_context().run, plan)
        thread.shutdown(wait=False)
        try:
            return await asyncio.wrap_future(planning)
        except asyncio.CancelledError:
            # The thread still reads the conversation's state: it is free once the thread is done.
            self._held = False
            planning.add_done_callback(self._abandon)
            raise

    def _abandon(self, planning: Future[Exchange]) -> None:
        if not planning.cancelled() and planning.exception() is None:
            planning.result().drop()
        self._conversation.release()

    async def __aenter__(self) -> Self:
        if self._exchange is None and self._steps.begin():
            more = False
            try:
                await self._opened()
                more = True
            finally:
                if self._steps.end(more=more):
                    await self._finish()
        self._begun()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The event loop closes the generator; the context must not stay busy until then.
        if hasattr(self, "_steps") and self._steps.stop():
            self._free()

    async def _finish(self) -> None:
        events, self._events = self._events, None
        try:
            if events is not None:
                await _stop(events)
        finally:
            self._free()

    def _free(self) -> None:
        if self._exchange is not None:
            self._exchange.drop()
        if self._held:
            self._held = False
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
        await asyncio.to_thread(self._conversation.leave)

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

    async def fan_out(self, count: int, *, warm: bool = True) -> list[Self]:
        """Return branches that go on from here; arguments and errors as `AgentKVContext.fan_out`."""
        made = branches(self._conversation, count)
        request: Request | None = None
        if warm:
            prompt = self._conversation.read(await self._conversation.sources.awaited())
            request = await asyncio.to_thread(warming, self._conversation, prompt)
        if request is not None:
            await asyncio.to_thread(compute_shared, self._conversation, request)
        return [self._of(conversation) for conversation in made]
