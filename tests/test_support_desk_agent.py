"""The support desk as a LangChain agent, and the graph with a reviewer, on a scripted chat model."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.messages import AIMessage
from rich.console import Console
from typer.testing import CliRunner

from agentkv import Inline, Mode, Policy
from examples.langgraph_subagent.graph import TASK, build
from examples.support_desk.__main__ import app
from examples.support_desk.agent import AGENT_SCRIPT, AgentDesk, Shop, make_tools, run_agent
from examples.support_desk.database import ORDER_ID, Column, open_database
from examples.support_desk.policy import POLICY
from tests.scripted_chat import ScriptedChat, Sent, append_only, calling, updates

ARGUMENTS = {
    "look_up_order": {"number": ORDER_ID},
    "change_address": {"address": "9 Orchard Street, Penmoor"},
    "cancel_order": {},
}


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A new database file."""
    made = Shop(tmp_path / "desk.sqlite", ORDER_ID)
    open_database(made.path).close()
    return made


def obedient(call: Sent) -> str | AIMessage:
    """Call the tool that has to be called; otherwise repeat the last message."""
    if call.forced:
        return calling(call.forced, f"call{len(call.messages):05d}", **ARGUMENTS[call.forced])
    return call.last


def test_the_script_runs_and_every_prompt_extends_the_one_before(shop: Shop) -> None:
    """Eleven model calls in eight turns; nothing that was sent is ever sent otherwise."""
    model = ScriptedChat(answers=obedient)
    result = run_agent(model, shop, Console(quiet=True))
    calls = sum(len(turn["reports"]) for turn in result["turns"])
    assert len(model.sent) == calls == len(AGENT_SCRIPT) + 3
    assert all(append_only(model.sent))
    assert result["summary"]["epochs"] == 1


def test_what_the_world_changed_is_said_before_the_question(shop: Shop) -> None:
    """A row that changes between turns is an erratum in the user's message."""
    model = ScriptedChat(answers=obedient)
    run_agent(model, shop, Console(quiet=True), AGENT_SCRIPT[:2])
    assert updates(model.sent[1]) == [
        "Update 1: the Order status is no longer in transit. The Order status is now held at customs."
    ]
    assert model.sent[1].messages[-1].type == "human"


def test_what_a_tool_changed_is_said_behind_its_result(shop: Shop) -> None:
    """The erratum stands in the tool's message, and the report names the tool."""
    model = ScriptedChat(answers=obedient)
    desk = AgentDesk(model, shop)
    desk.ask("Hello")
    messages = desk.ask("Send it elsewhere.", "change_address")
    last = model.sent[-1]
    assert last.messages[-1].type == "tool"
    assert last.last.startswith("The address is saved.")
    assert "The Delivery address is now 9 Orchard Street, Penmoor." in last.last
    report = messages[-1].response_metadata["agentkv"]
    assert report["changed_by"] == {"order.address": "change_address"}
    assert shop.row().address == "9 Orchard Street, Penmoor"


def test_the_conversation_holds_no_errata(shop: Shop) -> None:
    """Who asks the desk sees questions, results and answers alone."""
    desk = AgentDesk(
        ScriptedChat(answers=lambda call: calling("cancel_order") if call.forced else "Done."), shop
    )
    desk.ask("Hello")
    messages = desk.ask("Cancel it.", "cancel_order")
    assert [message.text for message in messages] == ["", "Done."]


def test_switched_off_the_prompt_is_rewritten(shop: Shop) -> None:
    """In mode off the same agent shows the current values in its prompt and says nothing."""
    model = ScriptedChat(answers=obedient)
    desk = AgentDesk(model, shop, Mode.OFF)
    desk.ask("Hello")
    shop.update(Column.STATUS, "lost")
    desk.ask("And now?")
    assert append_only(model.sent) == [False]
    assert "Order status: lost" in model.sent[1].messages[0].text
    assert updates(model.sent[1]) == []


def test_an_order_that_is_not_there_is_an_answer_and_no_crash(shop: Shop) -> None:
    """The tool says that there is no such order."""
    look_up = make_tools(shop)[0]
    assert "no order 'LO-00000'" in look_up.invoke({"number": "LO-00000"})


def test_the_agent_does_not_chat(tmp_path: Path) -> None:
    """Together with --interactive it is refused with what to do."""
    failed = CliRunner().invoke(app, ["--agent", "langchain", "--interactive"])
    assert failed.exit_code != 0
    assert "--interactive" in failed.output


def test_the_reviewer_goes_on_from_the_desks_prompt(shop: Shop) -> None:
    """Its first prompt is the desk's last one and its answer, with the task behind."""
    model = ScriptedChat(answers=["It is in transit.", "That is right.", "It is lost.", "Right again."])
    desk = build(model, [Policy(Inline(POLICY)), *shop.fields()], make_tools(shop))
    assert desk.ask("1", "Where is it?")["review"] == "That is right."
    shop.update(Column.STATUS, "lost")
    desk.ask("1", "And now?")
    first, review, second, again = model.sent
    for later in (review, second):
        assert later.prompt.startswith(first.prompt + "It is in transit.")
    assert review.last == TASK
    assert again.prompt.startswith(second.prompt + "It is lost.")


def test_the_reviewer_is_told_what_the_desk_was_told(shop: Shop) -> None:
    """A change stands once in each prompt, in the same place; neither thread says it again."""
    model = ScriptedChat()
    desk = build(model, [Policy(Inline(POLICY)), *shop.fields()], make_tools(shop))
    desk.ask("1", "Where is it?")
    shop.update(Column.STATUS, "lost")
    desk.ask("1", "And now?")
    desk.ask("1", "Still?")
    told = [updates(call) for call in model.sent]
    line = ["Update 1: the Order status is no longer in transit. The Order status is now lost."]
    assert told == [[], [], line, line, line, line]


def test_what_changes_during_the_review_is_said_to_both(shop: Shop) -> None:
    """The reviewer's tool changes the order: said behind its result, and before the desk's next question."""
    model = ScriptedChat(
        answers=["Shall I cancel?", calling("cancel_order"), "Cancelled.", "It is cancelled."]
    )
    desk = build(model, [Policy(Inline(POLICY)), *shop.fields()], make_tools(shop))
    desk.ask("1", "Cancel it.")
    desk.ask("1", "Did you?")
    line = "Update 1: the Order status is no longer in transit. The Order status is now cancelled."
    assert [updates(call) for call in model.sent[:4]] == [[], [], [line], [line]]
    assert model.sent[3].prompt.startswith(model.sent[0].prompt)
