"""Streams that are closed from elsewhere, and changes from several threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Document, Field, Policy, Stream
from agentkv.backends.base import Event, Request
from agentkv.errors import BackendError, ContextBusyError, ContextClosedError, ContextError, InputError
from agentkv.testing import ScriptedBackend
from tests.desk import KEY, desk

COMPLETION = len("Hello.")
"""Number of the event that ends the scripted answer."""


class Gated(ScriptedBackend):
    """A backend that waits before one event of its first answer until it may go on."""

    def __init__(self, before: int, **options: Any) -> None:
        super().__init__(["Hello.", "Fine."], **options)
        self.before = before
        self.inside, self.go = threading.Event(), threading.Event()
        self.closed = 0

    def stream(self, request: Request) -> Iterator[Event]:
        """Give the scripted events."""
        return self._gated(super().stream(request), first=len(self.requests) == 1)

    def _gated(self, events: Iterator[Event], *, first: bool) -> Iterator[Event]:
        try:
            for number, event in enumerate(events):
                if first and number == self.before:
                    self.inside.set()
                    self.go.wait(10)
                yield event
        finally:
            self.closed += 1


class GatedNative(Gated):
    """The same with an asynchronous stream."""

    async def astream(self, request: Request) -> AsyncIterator[Event]:
        """Give the scripted events, waiting without blocking the event loop."""
        first = not self.requests
        try:
            for number, event in enumerate(ScriptedBackend.stream(self, request)):
                if first and number == self.before:
                    self.inside.set()
                    await asyncio.to_thread(self.go.wait, 10)
                yield event
        finally:
            self.closed += 1


def consumed(stream: Stream) -> Future[list[str]]:
    """Iterate a stream in a thread; returns the texts that it will have given."""
    thread = ThreadPoolExecutor(1)
    texts = thread.submit(lambda: [delta.text for delta in stream])
    thread.shutdown(wait=False)
    return texts


@pytest.mark.parametrize("before", [2, COMPLETION])
def test_closing_from_another_thread_ends_the_iteration_and_records_nothing(before: int) -> None:
    """The context is busy until the side that iterates has stopped the model; then it goes on."""
    backend = Gated(before)
    with desk(backend) as ctx:
        stream = ctx.stream("a")
        texts = consumed(stream)
        assert backend.inside.wait(10)
        stream.close()
        stream.close()
        with pytest.raises(ContextBusyError):
            ctx.ask("b")
        backend.go.set()
        assert texts.result(10) == list("Hello.")[:before]
        assert stream.reply is None
        assert backend.closed == 1
        assert len(ctx.ledger) == 0
        assert ctx.ask("b").text == "Fine."
        kept = ctx.ledger
        assert next(stream, None) is None
        with pytest.raises(BackendError, match="its stream was closed"):
            stream.keep()
        assert ctx.ledger is kept


def test_stream_is_iterated_and_kept_in_one_place() -> None:
    """A second thread that asks for a delta, or keeps the stream, is refused; the first one goes on."""
    backend = Gated(2)
    with desk(backend) as ctx:
        stream = ctx.stream("a")
        texts = consumed(stream)
        assert backend.inside.wait(10)
        with pytest.raises(ContextBusyError, match="in one place"):
            next(stream)
        with pytest.raises(ContextBusyError, match="in one place"):
            stream.keep()
        backend.go.set()
        assert "".join(texts.result(10)) == "Hello."
        assert stream.reply is not None


def test_closing_from_within_the_model_call_ends_it() -> None:
    """A stop button that is pressed in the iterating thread itself, as by a signal."""
    pressed: list[Stream] = []

    class Pressing(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            for event in super().stream(request):
                for stream in pressed:
                    stream.close()
                yield event

    with desk(Pressing(["Hello."])) as ctx:
        stream = ctx.stream("a")
        next(stream)
        pressed.append(stream)
        assert next(stream, None) is None
        pressed.clear()
        assert len(ctx.ledger) == 0
        assert ctx.ask("b").text == "Hello."


@pytest.mark.parametrize("kind", [Gated, GatedNative])
@pytest.mark.parametrize("before", [2, COMPLETION])
async def test_closing_from_another_task_ends_the_iteration(kind: type[Gated], before: int) -> None:
    """As from another thread, with an asynchronous stream or one that runs in a thread."""
    backend = kind(before)
    async with AsyncAgentKVContext(backend, [Policy("Be brief.")], salt_key=KEY) as ctx:
        stream = ctx.stream("a")

        async def consume() -> list[str]:
            return [delta.text async for delta in stream]

        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(backend.inside.wait, 10)
        await stream.aclose()
        with pytest.raises(ContextBusyError):
            await ctx.ask("b")
        backend.go.set()
        assert await task == list("Hello.")[:before]
        assert stream.reply is None
        assert len(ctx.ledger) == 0
        assert (await ctx.ask("b")).text == "Fine."


async def test_stream_that_is_closed_while_its_fields_are_awaited_sends_nothing() -> None:
    """The iteration ends before the model is asked."""
    backend, started, go = ScriptedBackend(), asyncio.Event(), asyncio.Event()
    async with AsyncAgentKVContext(backend, [Policy("Be brief.")], salt_key=KEY) as ctx:

        @ctx.field(label="Slow")
        async def slow() -> int:
            started.set()
            await go.wait()
            return 1

        stream = ctx.stream("a")

        async def consume() -> list[str]:
            return [delta.text async for delta in stream]

        task = asyncio.create_task(consume())
        await started.wait()
        await stream.aclose()
        go.set()
        assert await task == []
        assert not backend.requests
        assert (await ctx.ask("a")).text == "OK."


class SlowTokenizer:
    """A tokenizer that waits before it renders until it may go on."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.wait = False
        self.inside, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def render(self, *args: Any, **options: Any) -> str:
        """Render messages."""
        if self.wait:
            self.inside.set()
            self.go.wait(10)
        return str(self.real.render(*args, **options))


async def test_planning_leaves_the_event_loop_free_and_the_context_busy() -> None:
    """A cancelled planning frees the context once its thread is done, not before."""
    tokenizer = SlowTokenizer(ScriptedBackend().tokenizer)
    backend = ScriptedBackend(tokenizer=tokenizer)
    async with AsyncAgentKVContext(backend, [Policy("Be brief.")], salt_key=KEY) as ctx:
        tokenizer.wait = True
        task = asyncio.create_task(ctx.ask("a"))
        assert await asyncio.to_thread(tokenizer.inside.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ContextBusyError):
            await ctx.ask("b")
        tokenizer.wait = False
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("agentkv-plan")]
        tokenizer.go.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert not backend.requests
        assert (await ctx.ask("b")).text == "OK."


async def test_leaving_leaves_the_event_loop_free() -> None:
    """What the backend does to release a conversation runs in a thread."""
    where: list[threading.Thread] = []

    class Releasing(ScriptedBackend):
        def release(self, conversation: str) -> None:
            where.append(threading.current_thread())

    async with AsyncAgentKVContext(Releasing(), [], salt_key=KEY):
        pass
    assert where != [threading.current_thread()]
    assert len(where) == 1


async def test_failed_stream_cannot_be_iterated_again() -> None:
    """Its call was refused and the context is free; another stream is needed."""
    async with AsyncAgentKVContext(ScriptedBackend(), [], salt_key=KEY) as ctx:
        stream = ctx.stream()
        with pytest.raises(InputError):
            await anext(stream)
        with pytest.raises(ContextError, match="before it began"):
            await anext(stream)
        with pytest.raises(ContextError, match="before it began"):
            await stream.keep()
        assert (await ctx.ask("b")).text == "OK."


def test_turn_is_committed_to_the_ledger_that_it_was_planned_on() -> None:
    """An answer to a record that was replaced meanwhile is dropped, and the newer record stays."""
    with desk(ScriptedBackend(["One.", "Two."])) as ctx:
        older = ctx.ledger
        ctx.ask("a")
        stream = ctx.stream("b")
        next(stream)
        ctx._conversation.resume(older)
        with pytest.raises(ContextError, match="went on"):
            list(stream)
        assert ctx.ledger is older
        assert ctx.report.turns == 1


@pytest.mark.parametrize("again", [False, True])
def test_stream_cannot_be_kept_after_its_context_was_left(again: bool) -> None:
    """Also not once the context is open again."""
    ctx = desk(ScriptedBackend(["Hello."]))
    with ctx:
        stream = ctx.stream("a")
        next(stream)
    if again:
        ctx.__enter__()
    with pytest.raises(ContextClosedError, match="was left"):
        stream.keep()
    assert len(ctx.ledger) == 0
    assert stream.reply is None


def test_no_change_is_lost_between_threads() -> None:
    """Fields that several threads add and set at once are all there with their last values."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with desk(ScriptedBackend()) as ctx:

            def work(name: str) -> None:
                for n in range(25):
                    ctx.add(Field(f"{name}.{n}", 0))
                    ctx.set(f"{name}.{n}", n + 1)
                    ctx.add(Document(f"{name}.{n}", "text"))

            threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            prompt = ctx.prompt
    finally:
        sys.setswitchinterval(before)
    assert {k: f.text for k, f in prompt.fields.items()} == {
        f"{name}.{n}": str(n + 1) for name in "abcd" for n in range(25)
    }
    assert len(prompt.segments) == 101


def test_change_is_made_while_no_other_is() -> None:
    """What one thread makes of the prompt is what the next one begins with."""
    inside, go = threading.Event(), threading.Event()
    with AgentKVContext(ScriptedBackend(), [Field("x", 1), Field("y", 1)]) as ctx:
        conversation = ctx._conversation

        def slow(prompt: Any) -> Any:
            inside.set()
            go.wait(10)
            return prompt.with_texts({"x": "2"})

        threads = [threading.Thread(target=conversation.change, args=(slow,))]
        threads[0].start()
        assert inside.wait(10)
        threads.append(threading.Thread(target=ctx.set, args=("y", 2)))
        threads[1].start()
        go.set()
        for thread in threads:
            thread.join(10)
        assert [field.text for field in ctx.prompt.fields.values()] == ["2", "2"]
