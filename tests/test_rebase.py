"""A rebase that is asked for: what it keeps, when it is made, and what never comes back."""

from __future__ import annotations

import pytest

from agentkv import Deletion, Field, Policy, ToolResult, Tools, UserMessage
from agentkv.errors import BackendError
from agentkv.testing import Scripted, ScriptedBackend
from tests.desk import call, desk, epochs, lookup, reason


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_turns_that_a_summary_replaced_never_come_back(keep: int) -> None:
    """A later rebase counts from the first turn that is still there; the earlier summary stays."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        for text in ("zebra one", "zebra two"):
            ctx.ask(text)
        ctx.rebase(summary="They spoke of animals.", keep_last=0)
        ctx.ask("third")
        ctx.rebase(keep_last=keep)
        ctx.ask("fourth")
    assert "zebra" not in backend.prompts[-1]
    assert backend.prompts[-1].index("They spoke of animals.") < backend.prompts[-1].index("third")


def test_new_summary_stands_for_the_earlier_one_too() -> None:
    """Also where it keeps all the turns that are left."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("zebra")
        ctx.rebase(summary="An animal.", keep_last=0)
        ctx.ask("second")
        ctx.rebase(summary="A striped animal.", keep_last=5)
        ctx.ask("third")
    last = backend.prompts[-1]
    assert "zebra" not in last
    assert "An animal." not in last
    assert last.index("A striped animal.") < last.index("second") < last.index("third")


def test_turns_that_are_left_out_without_a_summary_take_the_earlier_one_along() -> None:
    """What stood for turns before them does not stand for them."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("zebra")
        ctx.rebase(summary="An animal.", keep_last=0)
        ctx.ask("second")
        ctx.rebase(keep_last=0)
        ctx.ask("third")
    assert "second" not in backend.prompts[-1]
    assert "An animal." not in backend.prompts[-1]


def test_rebase_that_is_asked_for_during_a_stream_is_made_by_the_next_turn() -> None:
    """And it counts the turn that was being answered: that one is kept, the one before is not."""
    backend = ScriptedBackend(["one", "two", "three"])
    with desk(backend) as ctx:
        ctx.ask("zebra")
        with ctx.stream("second") as stream:
            next(stream)
            ctx.rebase(summary="An animal.", keep_last=1)
            for _ in stream:
                pass
        assert stream.reply is not None
        assert reason(stream.reply) is None
        assert reason(ctx.ask("third")) is not None
        assert reason(ctx.ask("fourth")) is None
    assert "zebra" not in backend.prompts[2]
    assert backend.prompts[2].index("An animal.") < backend.prompts[2].index("second")


def test_later_request_outlives_the_turn_that_made_an_earlier_one() -> None:
    """A turn does away with the very request that it served."""
    with desk(ScriptedBackend()) as ctx:
        ctx.ask("a")
        ctx.rebase()
        with ctx.stream("b") as stream:
            next(stream)
            ctx.rebase()
            for _ in stream:
                pass
        assert stream.reply is not None
        assert reason(stream.reply) is not None
        assert reason(ctx.ask("c")) is not None
        assert reason(ctx.ask("d")) is None


def test_round_that_opens_after_the_request_is_kept() -> None:
    """A turn with open tool calls stays whole, though no turn was to be kept."""
    backend = ScriptedBackend(["one", call(), "done"])
    with desk(backend, Tools([lookup])) as ctx:
        ctx.ask("zebra")
        with ctx.stream("second") as stream:
            next(stream)
            ctx.rebase(summary="An animal.", keep_last=0)
            for _ in stream:
                pass
        assert stream.reply is not None
        reply = ctx.send(ToolResult(stream.reply.tool_calls[0].id, "found"))
        assert reason(reply) is not None
    assert "zebra" not in backend.prompts[-1]
    assert "second" in backend.prompts[-1]
    assert "found" in backend.prompts[-1]


def test_fork_keeps_a_request() -> None:
    """Parent and child each make the rebase once."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("zebra")
        ctx.rebase(summary="An animal.", keep_last=0)
        with ctx.fork() as child:
            assert reason(child.ask("second")) is not None
            assert "zebra" not in backend.prompts[-1]
            assert reason(child.ask("third")) is None
        assert reason(ctx.ask("fourth")) is not None


def test_hard_deletion_reaches_the_summary_of_a_request() -> None:
    """What was told of the field, and what is current, is gone from the summary that was asked for."""
    backend = ScriptedBackend()
    with desk(backend, Field("card", "4111-1111")) as ctx:
        ctx.ask("a")
        ctx.set("card", "4222-2222")
        ctx.rebase(summary="The card was 4111-1111 and is 4222-2222.", keep_last=0)
        ctx.remove("card", Deletion.HARD)
        ctx.ask("b")
        stored = ctx.ledger.to_json()
    assert "4111" not in backend.prompts[-1] + stored
    assert "4222" not in backend.prompts[-1] + stored
    assert "The card was [redacted] and is [redacted]." in backend.prompts[-1]


def test_observed_turns_are_rebased_too() -> None:
    """What agentkv would have sent leaves out the same turns, so that its cached tokens are those of it."""
    backend = ScriptedBackend()
    parts = [Field("x", 1)]
    with desk(backend, *parts) as ctx:
        ctx.ask("zebra" * 100)
        ctx.rebase(summary="An animal.", keep_last=0)
        expected = [ctx.ask("b").report.cached_tokens, ctx.ask("c").report.cached_tokens]
    with desk(ScriptedBackend(), *parts, mode="observe") as ctx:
        ctx.ask("zebra" * 100)
        ctx.rebase(summary="An animal.", keep_last=0)
        found = [ctx.ask(text).report.would_have_cached_tokens for text in "bc"]
    assert found == expected


def test_observing_goes_on_after_a_turn_that_agentkv_could_not_have_planned() -> None:
    """That turn reports None; the next one, a round it never saw opening, is compared with what was sent."""
    with desk(
        ScriptedBackend(["OK", call(), "OK"], context_window=1_500), Tools([lookup]), mode="observe"
    ) as ctx:
        first = ctx.ask("a").report
        # The room that is left is too small for the announcement of errata.
        reply = ctx.ask("b", max_tokens=1_500 - first.prompt_tokens - 100)
        assert reply.report.would_have_cached_tokens is None
        report = ctx.send(ToolResult(reply.tool_calls[0].id, "found")).report
        assert report.would_have_cached_tokens is not None


def test_request_survives_a_failed_call_with_what_it_keeps() -> None:
    """It is planned anew with the retry."""
    backend = ScriptedBackend(["OK", Scripted(error=BackendError("no")), "OK"])
    with desk(backend, Policy("Two.", name="two")) as ctx:
        ctx.ask("zebra")
        ctx.rebase(summary="An animal.", keep_last=0)
        with pytest.raises(BackendError):
            ctx.send(UserMessage("b"))
        ctx.ask("b")
    assert backend.requests[1].ids == backend.requests[2].ids
    assert epochs(ctx.ledger)[-1].summary == "An animal."
