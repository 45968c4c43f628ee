"""Fields in LangChain's terms: where their values come from, and when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from agentkv import Inline, Policy
from agentkv.errors import FieldError, SegmentError, ValueRenderError
from langchain.agents.middleware import AgentState
from langchain.tools import ToolRuntime
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command

from agents import Desk, Order, report
from langchain_agentkv import (
    Refresh,
    Scope,
    field,
    from_context,
    from_function,
    from_state,
    from_store,
    updates,
)
from langchain_agentkv.fields import check_needs, walk
from scripted import append_only, calling, updates_in


class OrderState(AgentState[Any]):
    """Graph state with an order in it."""

    order: dict[str, Any]


@dataclass
class Who:
    """Runtime context."""

    user_id: str
    tier: str


@updates("order.status")
@tool
def cancel(runtime: ToolRuntime) -> Command[Any]:
    """Cancel the order."""
    done = ToolMessage("Cancelled.", tool_call_id=runtime.tool_call_id)
    return Command(update={"order": {"status": "cancelled"}, "messages": [done]})


def test_a_field_of_graph_state_follows_the_tool_that_changes_it():
    """A tool's Command changes state; what it changed is said behind its result."""
    status = from_state("order.status", label="Order status")
    desk = Desk(
        [calling(("cancel", {})), "Done."], segments=[status], tools=[cancel], state_schema=OrderState
    )
    given = {"messages": [("user", "Cancel it")], "order": {"status": "open"}}
    result = desk.agent.invoke(given, desk.config())
    assert "Order status: open" in desk.calls[0].system
    assert desk.calls[1].messages[-1].content == (
        "Cancelled.\n\nUpdate 1: the Order status is no longer open. The Order status is now cancelled."
    )
    assert report(result)["changed_by"] == {"order.status": "cancel"}
    assert append_only(desk.calls) == [True]


def test_state_that_is_not_there_reads_as_none():
    """A key that no node has written yet is no error."""
    desk = Desk(segments=[from_state("order.status", label="Order status")], state_schema=OrderState)
    desk.ask("Hello")
    assert "Order status: none" in desk.calls[0].system


def test_a_field_of_the_runs_context():
    """What `context_schema` brings is told, and said again when a run brings another."""
    desk = Desk(segments=[from_context("user.tier", "tier", label="Tier")], context_schema=Who)
    for tier in ("silver", "gold"):
        given: Any = {"messages": [("user", "Hello")]}
        desk.agent.invoke(given, desk.config(), context=Who("mara", tier))
    assert "Tier: silver" in desk.calls[0].system
    assert updates_in(desk.calls[1]) == ["Update 1: the Tier is no longer silver. The Tier is now gold."]


@pytest.mark.parametrize("run", ["sync", "async"])
async def test_a_field_of_the_store(run: str):
    """A store's item, found by the run's context, in sync and in async runs."""
    store = InMemoryStore()
    store.put(("users",), "mara", {"language": "Danish"})
    language = from_store(
        "user.language",
        namespace=("users",),
        item=lambda scope: scope.context.user_id,
        path="language",
        label="Language",
    )
    desk = Desk(segments=[language], context_schema=Who, store=store)
    for spoken in ("Danish", "Dutch"):
        store.put(("users",), "mara", {"language": spoken})
        given: Any = {"messages": [("user", "Hello")]}
        if run == "sync":
            desk.agent.invoke(given, desk.config(), context=Who("mara", "gold"))
        else:
            await desk.agent.ainvoke(given, desk.config(), context=Who("mara", "gold"))
    assert updates_in(desk.calls[1]) == [
        "Update 1: the Language is no longer Danish. The Language is now Dutch."
    ]


def test_a_store_field_without_a_store_says_what_to_do():
    """The message names the field and the missing part."""
    desk = Desk(segments=[from_store("x", namespace=("users",), item="mara")])
    with pytest.raises(FieldError, match=r"'x' comes from the store.*store="):
        desk.ask("Hello")


def test_a_field_of_a_function():
    """A decorated function is a field; it can ask for what it needs by name."""

    @field("today", label="Today")
    def today() -> date:
        return date(2026, 5, 4)

    @field("count", label="Messages so far")
    def count(state: dict[str, Any]) -> int:
        return len(state["messages"])

    desk = Desk(segments=[today, count])
    desk.ask("Hello")
    desk.ask("And?")
    assert "Today: 2026-05-04" in desk.calls[0].system
    assert updates_in(desk.calls[1]) == [
        "Update 1: the Messages so far is no longer 1. The Messages so far is now 3."
    ]


async def test_an_async_function_is_awaited():
    """Async fields work in async runs, and say so in sync ones."""

    @field("status", label="Status")
    async def status() -> str:
        return "open"

    desk = Desk(segments=[status])
    await desk.aask("Hello")
    assert "Status: open" in desk.calls[0].system
    with pytest.raises(FieldError, match="ainvoke"):
        desk.ask("Hello", "other")


def test_a_function_with_other_parameters_is_refused():
    """What cannot be given by name is a mistake at declaration."""
    with pytest.raises(FieldError, match="takes weather"):
        from_function("x", lambda weather: weather)


def test_a_slow_field_is_read_only_when_it_can_have_changed():
    """`Refresh.DECLARED`: read with the user's message and after a tool that updates it."""
    reads = []

    def read() -> str:
        reads.append(1)
        return f"read {len(reads)}"

    @updates("status")
    @tool
    def touch() -> str:
        """Touch it."""
        return "ok"

    @tool
    def look() -> str:
        """Look."""
        return "ok"

    status = from_function("status", read, label="Status", refresh=Refresh.DECLARED)
    desk = Desk(
        [calling(("look", {})), calling(("touch", {}), start=2), "Done."],
        segments=[status],
        tools=[touch, look],
    )
    desk.ask("Go")
    assert len(reads) == 2
    assert updates_in(desk.calls[1]) == []
    assert updates_in(desk.calls[2]) == [
        "Update 1: the Status is no longer read 1. The Status is now read 2."
    ]


def test_a_field_stands_inline_in_a_segment():
    """A source can be shown inside a policy's text."""
    tier = from_context("tier", label="Tier")
    desk = Desk(segments=[Policy(Inline("You serve a {tier} customer.")), tier], context_schema=Who)
    given: Any = {"messages": [("user", "Hello")]}
    desk.agent.invoke(given, desk.config(), context=Who("mara", "gold"))
    assert "You serve a gold customer." in desk.calls[0].system


def test_a_segment_that_shows_an_unknown_field_is_refused():
    """The mistake shows where it is made."""
    with pytest.raises(SegmentError, match="tier"):
        Desk(segments=[Policy(Inline("You serve a {tier} customer."))])


def test_a_value_without_text_names_its_field():
    """A value that cannot be shown is no silent repr."""
    desk = Desk(segments=[from_function("x", object)])
    with pytest.raises(ValueRenderError, match="'x'"):
        desk.ask("Hello")


def test_updates_without_a_key_is_refused():
    """A declaration that declares nothing is a mistake."""
    with pytest.raises(FieldError, match="give the keys"):
        updates()


def test_a_path_goes_through_keys_and_attributes():
    """Mappings, attributes, and a key that holds dots."""
    assert walk({"order": Order(status="open")}, "order.status") == "open"
    assert walk({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert walk({"a": None}, "a.b") is None


def test_needs_are_checked_by_who_has_less():
    """A field that reads graph state cannot be read where there is none."""
    with pytest.raises(FieldError, match="reads the graph's state"):
        check_needs([from_state("a")], [], "a wrapped model")
    check_needs([from_function("a", lambda: 1)], [], "a wrapped model")


def test_a_scope_is_empty_by_default():
    """Nothing to read from is no error by itself."""
    assert from_state("a").read(Scope()) is None
