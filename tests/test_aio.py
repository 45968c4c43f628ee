"""The asynchronous context does what the synchronous one does, and can be cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, AsyncStream, Policy, Skill, ToolResult, Tools
from agentkv.backends.base import Event, Request
from agentkv.errors import BackendError, ContextBusyError, ContextClosedError, ContextError, FieldError
from agentkv.testing import Scripted, ScriptedBackend
from tests.desk import KEY, Order, call, errata, extends, lookup


def adesk(backend: ScriptedBackend, *segments: Any, **options: Any) -> AsyncAgentKVContext:
    """Make an asynchronous context of a policy and further segments."""
    return AsyncAgentKVContext(backend, [Policy("Be brief."), *segments], salt_key=KEY, **options)


class Native(ScriptedBackend):
    """A scripted backend with an asynchronous stream; it can wait amid an answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.waits = False
        self.waiting = asyncio.Event()
        self.closed = 0

    async def astream(self, request: Request) -> AsyncIterator[Event]:
        """Give the scripted events, stopping after the third if told to."""
        try:
            for number, event in enumerate(self.stream(request)):
                if self.waits and number == 3:
                    self.waiting.set()
                    await asyncio.Event().wait()
                yield event
        finally:
            self.closed += 1


SCRIPT = ["Hello.", call(), "Done.", "Bye."]


@pytest.mark.parametrize("kind", [ScriptedBackend, Native])
async def test_same_script_gives_the_same_requests_and_ledger(kind: type[ScriptedBackend]) -> None:
    """Errata, tools, segments and a rebase: prompts and records are those of the synchronous context."""
    plain, order = ScriptedBackend(SCRIPT), Order()
    with AgentKVContext(plain, [Policy("Be brief."), Tools([lookup]), order], salt_key=KEY) as ctx:
        ctx.ask("a")
        order.status = "lost"
        reply = ctx.ask("b")
        ctx.send(ToolResult(reply.tool_calls[0].id, "x"))
        ctx.add(Skill("s", "t"))
        ctx.rebase()
        ctx.ask("c")
    other, order = kind(SCRIPT), Order()
    async with adesk(other, Tools([lookup]), order) as actx:
        await actx.ask("a")
        order.status = "lost"
        reply = await actx.ask("b")
        await actx.send(ToolResult(reply.tool_calls[0].id, "x"))
        actx.add(Skill("s", "t"))
        actx.rebase()
        await actx.ask("c")
    assert [request.ids for request in other.requests] == [request.ids for request in plain.requests]
    assert actx.ledger.to_json() == ctx.ledger.to_json()


async def test_coroutine_functions_are_awaited() -> None:
    """A pulled field may be a coroutine function; a synchronous context refuses it."""
    backend = ScriptedBackend()
    async with adesk(backend) as ctx:

        @ctx.field(label="Stock")
        async def stock() -> int:
            await asyncio.sleep(0)
            return 7

        await ctx.ask("a")
    assert "- Stock: 7" in backend.prompts[0]
    with AgentKVContext(backend, []) as plain:
        plain.field(label="Stock")(stock)
        with pytest.raises(FieldError, match="AsyncAgentKVContext"):
            plain.ask("a")


async def test_stream_gives_deltas_and_then_the_reply() -> None:
    """The call begins with the iteration, not before."""
    backend = ScriptedBackend(["Grüße"])
    async with adesk(backend) as ctx:
        stream = ctx.stream("a")
        assert isinstance(stream, AsyncStream)
        assert not backend.requests
        assert not stream.reply
        assert "".join([delta.text async for delta in stream]) == "Grüße"
        assert stream.reply is not None
        assert stream.reply.text == "Grüße"


async def test_cancelling_amid_an_answer_commits_nothing() -> None:
    """The model is stopped, the context is free, and the retry sends the same bytes."""
    backend, order = Native(["Hi", "A long answer."]), Order()
    async with adesk(backend, order) as ctx:
        await ctx.ask("a")
        before = ctx.ledger
        order.status = "lost"
        backend.waits = True
        task = asyncio.create_task(ctx.ask("b"))
        await backend.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ctx.ledger is before
        assert backend.closed == 2
        backend.waits = False
        assert (await ctx.ask("b")).text == "A long answer."
    assert backend.requests[1].ids == backend.requests[2].ids
    assert [entry.revision for entry in errata(ctx.ledger)] == [1]


async def test_cancelling_a_backend_that_runs_in_a_thread() -> None:
    """The event loop goes on although the thread is in the middle of a step."""
    inside, go = threading.Event(), threading.Event()

    def slow(_: Request) -> str:
        inside.set()
        go.wait(10)
        return "Too late."

    class Lazy(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            yield from super().stream(request)

    async with adesk(Lazy([slow, "Fine."])) as ctx:
        task = asyncio.create_task(ctx.ask("a"))
        await asyncio.to_thread(inside.wait, 10)
        with pytest.raises(ContextBusyError):
            await ctx.ask("b")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(ctx.ledger) == 0
        go.set()
        assert (await ctx.ask("a")).text == "Fine."


async def test_cancelling_while_a_field_is_awaited_frees_the_context() -> None:
    """Nothing was sent, and the next call works."""
    backend, started = ScriptedBackend(), asyncio.Event()
    waits = True
    async with adesk(backend) as ctx:

        @ctx.field(label="Slow")
        async def slow() -> int:
            if waits:
                started.set()
                await asyncio.Event().wait()
            return 1

        task = asyncio.create_task(ctx.ask("a"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not backend.requests
        waits = False
        assert (await ctx.ask("a")).text == "OK."


@pytest.mark.parametrize("kind", [ScriptedBackend, Native])
async def test_stream_that_is_left_early_is_discarded(kind: type[ScriptedBackend]) -> None:
    """`async with` closes it: nothing is recorded."""
    backend = kind(["A long answer.", "Short."])
    async with adesk(backend) as ctx:
        async with ctx.stream("a") as stream:
            async for _ in stream:
                break
            with pytest.raises(ContextBusyError):
                await ctx.ask("b")
        assert len(ctx.ledger) == 0
        assert (await ctx.ask("a")).text == "Short."
        with pytest.raises(BackendError, match="its stream was closed"):
            await stream.keep()


async def test_dropped_stream_frees_the_context() -> None:
    """A stream that is forgotten without closing it is discarded."""
    async with adesk(Native(["A long answer.", "Short."])) as ctx:
        stream = ctx.stream("a")
        await anext(stream)
        del stream
        gc.collect()
        assert (await ctx.ask("a")).text == "Short."
        await asyncio.sleep(0)


async def test_closed_stream_never_begins() -> None:
    """A stream that was closed before its first iteration sends nothing."""
    backend = ScriptedBackend()
    async with adesk(backend) as ctx:
        stream = ctx.stream("a")
        await stream.aclose()
        with pytest.raises(ContextError, match="before it began"):
            await anext(stream)
        assert not backend.requests
        assert (await ctx.ask("a")).text == "OK."


@pytest.mark.parametrize("kind", [ScriptedBackend, Native])
async def test_kept_stream_is_recorded(kind: type[ScriptedBackend]) -> None:
    """What was shown is the answer, and the next prompt extends it."""
    backend = kind(["A long answer.", "Short."])
    async with adesk(backend) as ctx:
        stream = ctx.stream("a")
        shown = (await anext(stream)).text + (await anext(stream)).text
        reply = await stream.keep()
        assert (reply.text, reply.stopped) == (shown, True)
        await ctx.ask("b")
    assert all(extends(backend))
    assert f"{shown}\n" in backend.prompts[-1]


async def test_failed_call_commits_nothing() -> None:
    """An error of the backend reaches the caller and leaves the context usable."""
    async with adesk(
        ScriptedBackend([Scripted("Hello", error=BackendError("no"), fail_after=2), "Fine."])
    ) as ctx:
        with pytest.raises(BackendError, match="no"):
            await ctx.ask("a")
        assert len(ctx.ledger) == 0
        assert (await ctx.ask("a")).text == "Fine."


async def test_call_outside_the_block_is_refused() -> None:
    """As with the synchronous context."""
    ctx = adesk(ScriptedBackend())
    with pytest.raises(ContextClosedError):
        await ctx.ask("a")


async def test_contexts_run_side_by_side() -> None:
    """Conversations over one backend do not wait for each other or mix."""
    backend = ScriptedBackend([lambda request: f"{len(request.ids)}"])

    async def talk(name: str) -> list[str]:
        async with adesk(backend) as ctx:
            return [(await ctx.ask(name * n)).text for n in (1, 2, 3)]

    answers = await asyncio.gather(*(talk(name) for name in "abcd"))
    assert all(answer == answers[0] for answer in answers)


async def test_fork_is_asynchronous_too() -> None:
    """A fork is a context of the same kind that begins with the parent's ids."""
    backend = ScriptedBackend()
    async with adesk(backend) as ctx:
        await ctx.ask("a")
        async with ctx.fork(Skill("s", "t")) as child:
            await child.ask("b")
    assert all(extends(backend))
