"""Streaming: what the user sees while the model answers holds no erratum."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from agents import Desk
from langchain_agentkv import AgentKVCallbackHandler
from scripted import append_only, calling, updates_in

MODES: list[Any] = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]
ANSWERS = [calling(("lookup", {"number": "7"})), "It is known.", "It was lost."]


def texts(chunk: Any) -> list[str]:
    """Return the texts of all messages in a streamed chunk."""
    if isinstance(chunk, BaseMessage):
        return [str(chunk.text)]
    if isinstance(chunk, dict):
        return [text for value in chunk.values() for text in texts(value)]
    if isinstance(chunk, list | tuple):
        return [text for value in chunk for text in texts(value)]
    return []


@pytest.mark.parametrize("mode", MODES)
def test_no_message_of_a_stream_holds_an_erratum(mode: Any):
    """All stream modes, with a tool round and a changed field."""
    desk = Desk(ANSWERS)
    seen = []
    for text in ("Look 7 up", "And now?"):
        given = {"messages": [("user", text)]}
        seen += [
            t for chunk in desk.agent.stream(given, desk.config(), stream_mode=mode) for t in texts(chunk)
        ]
        desk.order.status = "lost"
    assert len(updates_in(desk.calls[-1])) == 1
    assert append_only(desk.calls) == [True, True]
    assert not [text for text in seen if "Update" in text]


@pytest.mark.parametrize("mode", MODES)
async def test_async_streams_are_the_same(mode: Any):
    """`astream` in all modes."""
    desk = Desk(ANSWERS)
    seen = []
    for text in ("Look 7 up", "And now?"):
        given = {"messages": [("user", text)]}
        async for chunk in desk.agent.astream(given, desk.config(), stream_mode=mode):
            seen += texts(chunk)
        desk.order.status = "lost"
    assert len(updates_in(desk.calls[-1])) == 1
    assert append_only(desk.calls) == [True, True]
    assert not [text for text in seen if "Update" in text]


def test_the_message_stream_is_the_answers_tokens():
    """Each answer is streamed once, in pieces, and nothing else of the model."""
    desk = Desk(["One two three."])
    desk.ask("Hello")
    desk.order.status = "lost"
    given = {"messages": [("user", "And?")]}
    chunks = [m for m, _ in desk.agent.stream(given, desk.config(), stream_mode="messages")]
    assert "".join(str(chunk.text) for chunk in chunks).split() == ["One", "two", "three."]


async def test_events_carry_the_report():
    """`astream_events` has the report as a custom event."""
    desk = Desk()
    events = desk.agent.astream_events({"messages": [("user", "Hello")]}, desk.config(), version="v2")
    reports = [event["data"] async for event in events if event["event"] == "on_custom_event"]
    assert [one["turn"] for one in reports] == [1]


def test_a_stream_that_is_left_records_nothing():
    """Who leaves a stream before the answer was whole is told the same again."""
    desk = Desk(["Hello.", "One two three.", "Yes."])
    desk.ask("Hello")
    desk.order.status = "lost"
    stream = desk.agent.stream({"messages": [("user", "And?")]}, desk.config(), stream_mode="messages")
    next(stream)
    stream.close()
    desk.agent.invoke({"messages": [("user", "Well?")]}, desk.config())
    assert len(updates_in(desk.calls[-1])) == 1


def test_a_callback_handler_sums_up():
    """The handler sees each call's report, in sync and in async runs."""
    handler = AgentKVCallbackHandler()
    desk = Desk(ANSWERS)
    desk.ask("Look 7 up", callbacks=[handler])
    desk.order.status = "lost"
    desk.ask("And?", callbacks=[handler])
    session = handler.session
    assert (session.calls, session.epochs, session.errata) == (3, 1, 1)
    assert session.reasons == ("first turn",)
    assert session.cached_share == pytest.approx(0.5, abs=0.01)
    assert [one["turn"] for one in handler.reports] == [1, 2, 3]
    assert str(session).startswith("3 calls, 1 epochs opened, 1 errata")


async def test_a_callback_handler_sums_up_async_runs():
    """The same under `ainvoke`."""
    handler = AgentKVCallbackHandler()
    desk = Desk(ANSWERS)
    await desk.aask("Look 7 up", callbacks=[handler])
    assert handler.session.calls == 2
