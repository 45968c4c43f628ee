"""Streams: whole answers are committed, stopped ones are discarded or kept."""

from __future__ import annotations

import gc

import pytest

from agentkv import AgentKVContext, ToolResult, Tools
from agentkv.entries import Generated
from agentkv.errors import BackendError, ContextBusyError, ContextClosedError
from agentkv.miss import Miss
from agentkv.testing import Scripted, ScriptedBackend
from tests.desk import Order, call, desk, errata, extends, lookup, new_text


def last(ctx: AgentKVContext) -> Generated:
    """Return the last recorded answer."""
    answer = ctx.ledger.state.generated
    assert answer is not None
    return answer


def test_deltas_make_up_the_answer() -> None:
    """Iterated to its end, a stream gives the whole text and then the reply."""
    with desk(ScriptedBackend(["Grüße 👋"])) as ctx:
        stream = ctx.stream("a")
        assert not stream.reply
        texts = [delta.text for delta in stream]
        assert "".join(texts) == "Grüße 👋"
        assert all(texts)
        assert stream.reply is not None
        assert stream.reply.text == "Grüße 👋"
        assert next(stream, None) is None
        assert not stream.reply.stopped


@pytest.mark.parametrize("how", ["close", "with", "break", "collect"])
def test_stopped_stream_is_discarded(how: str) -> None:
    """Closed, left, dropped: nothing is recorded, and the retry says the erratum with the same bytes."""
    backend, order = ScriptedBackend(["Hi", "A long answer.", "Short."]), Order()
    with desk(backend, order) as ctx:
        ctx.ask("a")
        before = ctx.ledger
        order.status = "lost"
        stream = ctx.stream("b")
        next(stream)
        if how == "close":
            stream.close()
            stream.close()
        elif how == "with":
            with stream:
                next(stream)
        elif how == "break":
            for _ in stream:
                break
            del stream
        else:
            del stream
            gc.collect()
        assert ctx.ledger is before
        assert ctx.ask("b").text == "Short."
        ctx.ask("c")
    assert backend.requests[1].ids == backend.requests[2].ids
    assert [entry.revision for entry in errata(ctx.ledger)] == [1]
    assert backend.prompts[-1].count("Update 1:") == 1


def test_open_stream_keeps_the_context_busy() -> None:
    """Another call is refused until the stream is closed; the stream goes on."""
    with desk(ScriptedBackend(["Hello."])) as ctx:
        with ctx.stream("a") as stream:
            with pytest.raises(ContextBusyError, match="close its stream"):
                ctx.ask("b")
            assert "".join(delta.text for delta in stream) == "Hello."
        assert ctx.ask("b").text == "Hello."


def test_kept_answer_is_recorded_as_far_as_it_came() -> None:
    """`keep` commits the turn with what was shown; the next prompt extends it."""
    backend, order = ScriptedBackend(["Hi", "A long answer.", "Short."]), Order()
    with desk(backend, order) as ctx:
        ctx.ask("a")
        order.status = "lost"
        stream = ctx.stream("b")
        shown = next(stream).text + next(stream).text + next(stream).text
        reply = stream.keep()
        assert (reply.text, reply.stopped) == (shown, True)
        assert last(ctx).stopped
        assert stream.keep() is reply
        ids = ctx.ledger.ids
        assert ids is not None
        ctx.ask("c")
    assert backend.requests[-1].ids.common_prefix(ids) == len(ids)
    assert all(extends(backend))
    assert f"{shown}\n" in backend.prompts[-1]
    assert backend.prompts[-1].count("Update 1:") == 1


@pytest.mark.parametrize("tokens", range(8))
def test_answer_kept_amid_a_character_ends_before_it(tokens: int) -> None:
    """However many bytes of a character came, the record holds whole characters and their ids."""
    backend = ScriptedBackend(["a👋é", "Fine."])
    with desk(backend) as ctx:
        stream = ctx.stream("x", max_tokens=300)
        events = stream._events
        assert events is not None
        for _ in range(tokens):
            stream._exchange.feed(next(events))
        reply = stream.keep()
        assert "a👋é".startswith(reply.text)
        assert bytes(last(ctx).ids or ()).decode() == reply.text
        ids = ctx.ledger.ids
        assert ids is not None
        ctx.ask("y")
        assert backend.requests[-1].ids.common_prefix(ids) == len(ids)
    assert "\ufffd" not in backend.prompts[-1]


def test_half_a_tool_call_that_is_kept_is_text() -> None:
    """A call that was cut off opens no round: the user can go on."""
    backend = ScriptedBackend([call(), "Fine."])
    with desk(backend, Tools([lookup])) as ctx:
        stream = ctx.stream("a")
        for _ in range(30):
            next(stream)
        reply = stream.keep()
        assert reply.text.startswith("<tool_call>")
        assert not reply.tool_calls
        assert not reply.refused
        assert ctx.ask("b").text == "Fine."
    assert all(extends(backend))


def test_whole_answer_that_is_kept_is_whole() -> None:
    """After its end `keep` returns the reply as it is, tool calls included."""
    with desk(ScriptedBackend([call(), "Done."]), Tools([lookup])) as ctx:
        stream = ctx.stream("a")
        for _ in stream:
            pass
        reply = stream.keep()
        assert not reply.stopped
        assert ctx.send(ToolResult(reply.tool_calls[0].id, "x")).text == "Done."


def test_discarded_stream_cannot_be_kept() -> None:
    """`keep` after `close` raises and records nothing."""
    with desk(ScriptedBackend(["Hello."])) as ctx:
        stream = ctx.stream("a")
        next(stream)
        stream.close()
        with pytest.raises(BackendError, match="its stream was closed"):
            stream.keep()
        assert len(ctx.ledger) == 0


def test_field_that_changes_while_an_answer_is_made_is_told_next() -> None:
    """The record holds the values that were rendered, not those at the answer's end."""
    backend, order = ScriptedBackend(), Order()
    with desk(backend, order) as ctx:
        with ctx.stream("a") as stream:
            next(stream)
            order.status = "lost"
            ctx.set("order.eta", "never")
            for _ in stream:
                pass
        assert ctx.ledger.state.fields["order.status"].text == "in transit"
        ctx.ask("b")
        assert ctx.ledger.state.fields["order.status"].text == "lost"
    assert "lost" not in backend.prompts[0]
    assert "lost" in new_text(backend)


def test_error_amid_a_stream_discards_it() -> None:
    """The deltas so far were shown, nothing was recorded, and the context is free."""
    failing = Scripted("Hello", error=BackendError("broken"), fail_after=3)
    with desk(ScriptedBackend([failing, "Fine."])) as ctx:
        stream = ctx.stream("a")
        assert [next(stream).text for _ in range(3)] == ["H", "e", "l"]
        with pytest.raises(BackendError, match="broken"):
            next(stream)
        assert next(stream, None) is None
        assert len(ctx.ledger) == 0
        assert ctx.ask("a").text == "Fine."


def test_stream_that_outlives_its_context_is_refused() -> None:
    """After leaving nothing is recorded any more."""
    with desk(ScriptedBackend(["Hello."])) as ctx:
        stream = ctx.stream("a")
        next(stream)
    with pytest.raises(ContextClosedError, match="was left"):
        next(stream)
    with ctx:
        assert ctx.ask("a").text == "Hello."


def test_kept_turn_reports_no_observation() -> None:
    """Where the call was stopped the server said nothing of its cache; the sums still add up."""
    with desk(ScriptedBackend(["Hello."])) as ctx:
        stream = ctx.stream("a")
        next(stream)
        report = stream.keep().report
    assert report.miss is Miss.UNREPORTED
    assert report.cached_tokens + report.spliced_tokens + report.computed_tokens == report.prompt_tokens
