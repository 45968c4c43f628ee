"""What becomes of a history that is not as it was recorded."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from agents import Desk, report
from langchain_agentkv.canonical import canonical, digest
from scripted import append_only, calling, extends, updates_in

SHAPES: list[Any] = ["", [], [{"type": "text", "text": ""}], [""]]


@pytest.mark.parametrize("content", SHAPES)
@pytest.mark.parametrize("extra", [{}, {"tool_calls": []}, {"tool_calls": None}])
def test_all_shapes_of_an_empty_answer_are_one(content: Any, extra: dict[str, Any]):
    """K15: content "", [] and [{"type": "text", "text": ""}], calls absent or empty: one digest, one form."""
    message = AIMessage(content=content, additional_kwargs=extra)
    plain = AIMessage(content="")
    assert digest(message) == digest(plain)
    assert canonical(message).content == ""
    assert "tool_calls" not in canonical(message).additional_kwargs


def test_content_none_is_empty_content():
    """K15: a content that a checkpoint gave back as None reads as none."""
    message = AIMessage.model_construct(
        content=None, tool_calls=[], invalid_tool_calls=[], additional_kwargs={}, response_metadata={}
    )
    assert digest(message) == digest(AIMessage(content=""))
    assert canonical(message).content == ""


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_that_comes_back_in_another_shape_is_the_same(shape: Any):
    """K15: the call is kept, the epoch goes on, and the form that was sent is sent again."""
    call = calling(("lookup", {"number": "7"}))
    desk = Desk([call, "Known.", "Yes."])
    result = desk.ask("Look 7 up")
    before = result["messages"][1]
    reshaped = before.model_copy(update={"content": shape, "additional_kwargs": {"tool_calls": []}})
    desk.agent.update_state(desk.config(), {"messages": [reshaped]})
    after = desk.ask("And?")
    assert report(after)["reason"] == ""
    assert append_only(desk.calls) == [True, True]
    assert desk.calls[2].messages[2].content == ""
    assert desk.calls[2].messages[2].tool_calls


def test_a_text_in_one_block_is_the_text():
    """K15: [{"type": "text", "text": "x"}] and "x" are one message."""
    assert digest(HumanMessage(content=[{"type": "text", "text": "x"}])) == digest(HumanMessage("x"))
    assert canonical(HumanMessage(content=[{"type": "text", "text": "x", "index": 0}])).content == "x"


def test_other_texts_are_other_messages():
    """A digest tells roles, texts, names and calls apart."""
    messages = [
        HumanMessage("x"),
        HumanMessage("y"),
        HumanMessage("x", name="mara"),
        AIMessage("x"),
        calling(("lookup", {"number": "7"}), text="x"),
        calling(("lookup", {"number": "8"}), text="x"),
    ]
    assert len({digest(message) for message in messages}) == len(messages)


def removed(desk: Desk, *ids: str) -> dict[str, Any]:
    """Remove messages from the state and ask again."""
    messages = [RemoveMessage(id=one) for one in ids]
    result: dict[str, Any] = desk.agent.invoke(
        {"messages": [*messages, HumanMessage("And now?")]}, desk.config()
    )
    return result


def test_a_fact_survives_the_removal_of_the_message_that_carried_it():
    """K36: the value is in the next prompt's system text, and revisions do not begin again."""
    desk = Desk()
    desk.ask("Hello")
    for status in ("packed", "sent", "delivered"):
        desk.order.status = status
        result = desk.ask("And?")
    carrier = result["messages"][-2]
    result = removed(desk, carrier.id)
    assert "Order status: delivered" in desk.calls[-1].system
    assert updates_in(desk.calls[-1]) == []
    assert report(result)["epoch"] == 2
    desk.order.status = "returned"
    desk.ask("Well?")
    assert [line.partition(":")[0] for line in updates_in(desk.calls[-1])] == ["Update 4"]


def test_removing_all_messages_keeps_the_facts():
    """K36: remove-all opens one epoch with what is true."""
    desk = Desk()
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    result = removed(desk, REMOVE_ALL_MESSAGES)
    assert "Order status: lost" in desk.calls[-1].system
    assert report(result)["reason"].startswith("the history changed")
    assert report(result)["revision"] == 1


def test_removing_a_message_opens_one_epoch():
    """K36: one removal, one epoch, with its reason; then the prefix stays again."""
    desk = Desk()
    first = desk.ask("Hello")["messages"][0]
    desk.ask("And?")
    result = removed(desk, first.id)
    assert report(result)["reason"] == "the history changed behind its first 0 messages"
    again = desk.ask("Fine?")
    assert report(again)["reason"] == ""
    assert append_only(desk.calls) == [True, False, True]


def test_an_edited_message_opens_an_epoch():
    """A message whose text was changed is another history."""
    desk = Desk()
    first = desk.ask("Hello")["messages"][0]
    desk.agent.update_state(desk.config(), {"messages": [HumanMessage("Hullo", id=first.id)]})
    assert report(desk.ask("And?"))["reason"] == "the history changed behind its first 0 messages"


def test_an_edited_last_answer_keeps_the_epoch():
    """Who approves an answer may edit it: all in front of it stays, and the report says so."""
    desk = Desk()
    desk.ask("Hello")
    desk.order.status = "lost"
    answer = desk.ask("And?")["messages"][-1]
    edited = answer.model_copy(update={"content": "Better."})
    desk.agent.update_state(desk.config(), {"messages": [edited]})
    result = desk.ask("Well?")
    assert report(result)["reason"] == ""
    assert report(result)["answer_edited"]
    assert extends(desk.calls[1], desk.calls[2], edited)
    assert report(desk.ask("So?"))["answer_edited"] is False
    assert append_only(desk.calls) == [True, True, True]


def test_an_answer_of_another_node_is_part_of_the_history():
    """Messages of other agents between two calls are told like any others."""
    desk = Desk()
    desk.ask("Hello")
    desk.order.status = "lost"
    more = [HumanMessage("Ask the other one."), AIMessage("The other one says hi."), HumanMessage("And you?")]
    result = desk.agent.invoke({"messages": more}, desk.config())
    assert report(result)["reason"] == ""
    assert desk.calls[1].messages[-1].content.startswith("Update 1")
    desk.ask("Fine?")
    assert append_only(desk.calls) == [True, True]


def test_a_call_without_a_result_is_no_crash():
    """A dangling call goes to the model as it stands."""
    desk = Desk()
    history = [HumanMessage("Hi"), calling(("lookup", {"number": "7"})), HumanMessage("Never mind.")]
    desk.agent.invoke({"messages": history}, desk.config())
    desk.order.status = "lost"
    desk.ask("And?")
    assert append_only(desk.calls) == [True]


def test_a_damaged_record_begins_anew():
    """What cannot be read is reported, and the conversation goes on."""
    desk = Desk(options={"unsupported_model_behavior": "ignore"})
    desk.ask("Hello")
    desk.agent.update_state(desk.config(), {"agentkv_log": [{"kind": "opening", "version": 1, "epoch": "x"}]})
    result = desk.ask("And?")
    assert report(result)["reason"] == "the stored ledger cannot be read"
    assert report(desk.ask("Well?"))["reason"] == ""
