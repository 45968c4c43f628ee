"""Answers that were stopped half-way, and what the next turn makes of them."""

from __future__ import annotations

import asyncio

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Field, Ledger, Policy, ToolResult, Tools
from agentkv.entries import Erratum, Generated
from agentkv.errors import BackendError, InputError
from agentkv.testing import Scripted, ScriptedBackend
from tests.cases.prompts import begins_with, call, said, tool

RULES = [Policy("Refund within thirty days."), Tools([tool("a"), tool("b")]), Field("limit", "old")]
HALF_CALL = call("a", '{"key": "value"}')
FAILS = [("Half of an answer.", 6), (HALF_CALL, 25), ("Grüße 👋", 9), ("👋", 2), ("x", 0)]
"""An answer, and after how many tokens (bytes) it breaks off: in text, in a call, in a character, at once."""
STOPS = [("Half of an answer.", 6), (HALF_CALL, 25), ("Grüße 👋", 3), ("👋👋", 1), ("x", 0)]
"""An answer, and after how many characters the caller stops it."""


def stopped(answer: str, tokens: int) -> ScriptedBackend:
    """A backend whose second answer breaks off there."""
    broken = Scripted(answer, error=BackendError("the connection was lost"), fail_after=tokens)
    return ScriptedBackend(["Hello.", broken, "Whole."])


@pytest.mark.parametrize(("answer", "tokens"), FAILS)
def test_a_call_that_fails_half_way_records_nothing_and_says_nothing_twice(answer: str, tokens: int) -> None:
    """The retry sends the very bytes of the first attempt, its erratum once (K42)."""
    backend = stopped(answer, tokens)
    with AgentKVContext(backend, RULES) as context:
        context.ask("One")
        before, length = context.ledger.ids, len(context.ledger)
        context.set("limit", "new")
        with pytest.raises(BackendError, match="connection was lost"):
            context.ask("Two")
        assert len(context.ledger) == length
        assert context.ledger.ids == before
        assert context.ask("Two").report.erratum == said(1, "Limit", old="old", new="new")
    assert backend.requests[-1].ids == backend.requests[-2].ids
    assert backend.prompts[-1].count(said(1, "Limit", old="old", new="new")) == 1


@pytest.mark.parametrize(("answer", "characters"), STOPS)
def test_a_stream_that_is_discarded_leaves_no_trace(answer: str, characters: int) -> None:
    """A field that changed meanwhile is told with the next turn, once and with its latest value (K42)."""
    backend = ScriptedBackend(["Hello.", answer, "Whole."])
    with AgentKVContext(backend, RULES) as context:
        context.ask("One")
        before = context.ledger.ids
        assert before is not None
        context.set("limit", "newer")
        with context.stream("Two") as stream:
            for _, _delta in zip(range(characters), stream, strict=False):
                pass
            context.set("limit", "newest")
            stream.close()
        assert context.ledger.ids == before
        reply = context.ask("Three")
        assert reply.report.erratum == said(1, "Limit", old="old", new="newest")
        assert begins_with(backend.requests[-1].ids, before)
        assert "Two" not in backend.prompts[-1]


@pytest.mark.parametrize(("answer", "characters"), STOPS)
def test_a_stream_that_is_kept_is_one_sealed_answer(answer: str, characters: int) -> None:
    """No open call, no half character; its erratum is not said again; the next prompt extends it (K42)."""
    backend = ScriptedBackend(["Hello.", answer, "Whole."])
    with AgentKVContext(backend, RULES) as context:
        context.ask("One")
        context.set("limit", "new")
        shown = ""
        with context.stream("Two") as stream:
            for _, delta in zip(range(characters), stream, strict=False):
                shown += delta.text
            context.set("limit", "newer")
            reply = stream.keep()
        assert reply.stopped
        assert reply.tool_calls == ()
        assert "\ufffd" not in reply.text
        assert reply.text.startswith(shown)
        assert context.ledger.state.open_calls == ()
        assert context.ledger.state.fields["limit"].text == "new"
        kept = context.ledger.ids
        assert kept is not None
        assert context.ask("Three").report.erratum == said(2, "Limit", old="new", new="newer")
        assert begins_with(backend.requests[-1].ids, kept)
        assert sum(isinstance(entry, Generated) for entry in context.ledger) == 3
        assert Ledger.from_json(context.ledger.to_json()).state == context.ledger.state


def test_between_two_parallel_results_nothing_can_be_recorded() -> None:
    """One result of two is refused with the other's name; both together go on (K42)."""
    backend = ScriptedBackend([call("a") + call("b"), "Both."])
    with AgentKVContext(backend, RULES) as context:
        first, second = context.ask("Go").tool_calls
        context.set("limit", "new")
        length = len(context.ledger)
        with pytest.raises(InputError, match=rf"{second.id} \(b\)"):
            context.send(ToolResult(first.id, "one"))
        with pytest.raises(InputError, match="without a result"):
            context.ask("Never mind")
        assert len(context.ledger) == length
        assert len(backend.requests) == 1
        reply = context.send(ToolResult(second.id, "two"), ToolResult(first.id, "one"))
        prompt = backend.prompts[-1]
        assert prompt.index("one") < prompt.index("two") < prompt.index(reply.report.erratum)


def test_a_stopped_round_of_results_can_be_sent_again() -> None:
    """The calls stay open until an answer to their results was recorded (K42)."""
    broken = Scripted("Bo", error=BackendError("lost"), fail_after=1)
    backend = ScriptedBackend([call("a"), broken, "Both."])
    with AgentKVContext(backend, RULES) as context:
        (made,) = context.ask("Go").tool_calls
        with pytest.raises(BackendError, match="lost"):
            context.send(ToolResult(made.id, "one"))
        assert [one.id for one in context.ledger.state.open_calls] == [made.id]
        assert context.send(ToolResult(made.id, "one")).text == "Both."
    assert backend.requests[-1].ids == backend.requests[-2].ids


async def test_a_cancelled_task_leaves_no_trace() -> None:
    """Cancelling an asynchronous call discards its turn, and the erratum is said by the next (K42)."""
    backend = ScriptedBackend(["Hello.", "Half of an answer.", "Whole."])
    async with AsyncAgentKVContext(backend, RULES) as context:
        await context.ask("One")
        before = context.ledger.ids
        assert before is not None
        context.set("limit", "new")
        begun = asyncio.Event()

        async def read() -> None:
            async with context.stream("Two") as stream:
                async for _ in stream:
                    begun.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.ledger.ids == before
        assert (await context.ask("Three")).report.erratum
        assert begins_with(backend.requests[-1].ids, before)
    assert sum(isinstance(entry, Erratum) for entry in context.ledger) == 1
