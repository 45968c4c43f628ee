"""Agents inside other graphs, interrupts inside tools, and many threads at once."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from agents import Desk, Order, lookup, report
from langchain_agentkv import create_agent
from scripted import Scripted, append_only, calling, extends, updates_in

THREAD: Any = {"configurable": {"thread_id": "1"}}


def test_an_agent_that_is_a_node_keeps_its_ledger_with_a_checkpointer_of_its_own():
    """With ``checkpointer=True`` the inner agent's state lives on between the outer graph's runs."""
    order, model = Order(), Scripted()
    agent = create_agent(model, [lookup], segments=[order], checkpointer=True)
    graph = StateGraph(MessagesState).add_node("desk", agent).add_edge(START, "desk")
    compiled = graph.compile(checkpointer=InMemorySaver())
    compiled.invoke({"messages": [("user", "Hello")]}, THREAD)
    order.status = "lost"
    compiled.invoke({"messages": [("user", "And?")]}, THREAD)
    compiled.invoke({"messages": [("user", "Well?")]}, THREAD)
    assert append_only(model.calls) == [True, True]
    assert len(updates_in(model.calls[2])) == 1


def test_an_agent_that_is_a_node_without_one_begins_anew_with_what_is_true():
    """Without it each outer run is an epoch, with right values."""
    order, model = Order(), Scripted()
    agent = create_agent(model, [lookup], segments=[order])
    graph = StateGraph(MessagesState).add_node("desk", agent).add_edge(START, "desk")
    compiled = graph.compile(checkpointer=InMemorySaver())
    compiled.invoke({"messages": [("user", "Hello")]}, THREAD)
    order.status = "lost"
    compiled.invoke({"messages": [("user", "And?")]}, THREAD)
    assert "Order status: lost" in model.calls[1].system


def test_a_tool_that_waits_for_a_human_goes_on_where_it_was(tmp_path: Path):
    """An interrupt in a tool, resumed by another agent on the same file after a fact changed."""

    @tool
    def approve(number: str) -> str:
        """Ask a human."""
        return f"The human said {interrupt(number)}."

    def desk(*answers: Any) -> Desk:
        saver = SqliteSaver(sqlite3.connect(tmp_path / "a.db", check_same_thread=False))
        return Desk(answers, tools=[approve], checkpointer=saver)

    first = desk(calling(("approve", {"number": "7"})))
    first.ask("Cancel 7")
    second = desk("Done.", "Yes.")
    second.order.status = "cancelled"
    result = second.agent.invoke(Command(resume="yes"), second.config())
    assert second.calls[0].messages[-1].content == (
        "The human said yes.\n\n"
        "Update 1: the Order status is no longer in transit. The Order status is now cancelled."
    )
    assert report(result)["reason"] == ""
    assert extends(first.calls[0], second.calls[0])
    second.ask("Thanks.")
    assert append_only(second.calls) == [True]


async def test_many_threads_at_once():
    """Runs of one agent that overlap keep their threads apart."""
    desk = Desk()
    names = [str(n) for n in range(12)]
    await asyncio.gather(*(desk.aask(f"Hello from {name}", name) for name in names))
    desk.order.status = "lost"
    await asyncio.gather(*(desk.aask(f"And {name}?", name) for name in names))
    firsts = {call.texts[1]: call for call in desk.calls[:12]}
    for call in desk.calls[12:]:
        assert extends(firsts[call.texts[1]], call)
        assert len(updates_in(call)) == 1
