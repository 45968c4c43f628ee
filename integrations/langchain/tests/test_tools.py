"""Tools that come and go between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from agentkv.errors import ConfigurationError
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.tools import InjectedToolCallId, tool

from agents import Desk, cancel, lookup, refund, report
from langchain_agentkv.toolset import Toolset
from scripted import append_only, calling, updates_in


class Selecting(AgentMiddleware[Any, Any, Any]):
    """Offers the tools of each call in turn."""

    def __init__(self, *rounds: list[Any]) -> None:
        super().__init__()
        self.rounds = list(rounds)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        tools = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        return handler(request.override(tools=tools))


ALL = [lookup, cancel, refund]


def test_a_removed_tool_is_said_and_stays_bound():
    """The schemas in front of the prompt stay; an erratum says that the tool no longer applies."""
    desk = Desk(tools=ALL, before=[Selecting(ALL, [lookup, cancel])])
    desk.ask("Hello")
    result = desk.ask("And?")
    assert desk.calls[1].names == desk.calls[0].names == ["cancel", "lookup", "refund"]
    assert updates_in(desk.calls[1]) == ["Update 1: the tool 'refund' no longer applies."]
    assert report(result)["reason"] == ""
    assert append_only(desk.calls) == [True]


def test_a_call_of_a_removed_tool_is_not_made():
    """The model is told that the tool is not available, and goes on."""
    answers = ["Hi.", calling(("refund", {"number": "7", "amount": 3})), "Sorry."]
    desk = Desk(answers, tools=ALL, before=[Selecting(ALL, [lookup, cancel])])
    desk.ask("Hello")
    result = desk.ask("Refund 7")
    assert desk.calls[-1].messages[-1].content == "The tool 'refund' is not available. It was not called."
    assert result["messages"][-1].content == "Sorry."
    assert append_only(desk.calls) == [True, True]


def test_beside_a_refused_call_the_others_are_made():
    """Of two calls in a round the one that can be made is made."""
    answers = ["Hi.", calling(("refund", {"number": "7", "amount": 3}), ("lookup", {"number": "7"})), "Well."]
    desk = Desk(answers, tools=ALL, before=[Selecting(ALL, [lookup, cancel])])
    desk.ask("Hello")
    desk.ask("Refund 7")
    results = {m.tool_call_id: m.content for m in desk.calls[-1].messages if m.type == "tool"}
    assert results == {
        "c1": "The tool 'refund' is not available. It was not called.",
        "c2": "Order 7 is known.",
    }


def test_an_added_tool_is_told_and_can_be_called():
    """A tool that comes later is told in the newest message, and called by the text of an answer."""
    text = 'Sure. <tool_call>{"name": "refund", "arguments": {"number": "7", "amount": 3}}</tool_call>'
    desk = Desk(["Hi.", text, "Refunded."], tools=ALL, before=[Selecting([lookup, cancel], ALL)])
    desk.ask("Hello")
    result = desk.ask("Refund 7")
    assert desk.calls[1].names == ["cancel", "lookup"]
    assert '"name": "refund"' in desk.calls[1].texts[-1]
    assert desk.calls[2].messages[-1].content == "3 refunded for 7."
    assert append_only(desk.calls) == [True, True]
    assert result["messages"][3].content == "Sure."


def test_an_added_tool_can_be_bound_instead():
    """Where calls in the text are not wanted, a tool that comes later opens an epoch."""
    desk = Desk(tools=ALL, before=[Selecting([lookup, cancel], ALL)], options={"added_tools": "bound"})
    desk.ask("Hello")
    assert report(desk.ask("And?"))["reason"] == "a tool was added that has to be bound"
    assert desk.calls[1].names == ["cancel", "lookup", "refund"]
    assert report(desk.ask("Well?"))["reason"] == ""


def test_an_unknown_choice_of_added_tools_is_refused():
    """A mistyped option is no default."""
    with pytest.raises(ConfigurationError, match="added_tools"):
        Desk(options={"added_tools": "maybe"})


def test_the_order_of_tools_changes_nothing():
    """Tools that are discovered in another order are bound as before, and nothing is said."""
    desk = Desk(tools=ALL, before=[Selecting(ALL, ALL[::-1])])
    desk.ask("Hello")
    desk.ask("And?")
    assert append_only(desk.calls) == [True]
    assert updates_in(desk.calls[1]) == []


def test_a_tool_with_another_schema_is_told_anew():
    """What is bound stays as it was; the new schema is told, and that it replaces the old."""

    @tool("lookup")
    def other(number: str, deep: bool) -> str:
        """Look an order up, deeply."""
        return number

    desk = Desk(tools=[lookup], before=[Selecting([lookup], [other])])
    desk.ask("Hello")
    desk.ask("And?")
    assert desk.calls[0].tools == desk.calls[1].tools
    assert "deeply" in desk.calls[1].texts[-1]
    assert append_only(desk.calls) == [True]


def test_a_providers_own_tool_opens_an_epoch():
    """A tool that is no function cannot be told; its coming is a new epoch with its reason."""
    search = {"type": "web_search_preview"}
    desk = Desk(tools=[lookup], before=[Selecting([lookup], [lookup, search])])
    desk.ask("Hello")
    assert "provider" in report(desk.ask("And?"))["reason"]
    assert report(desk.ask("Well?"))["reason"] == ""


def test_injected_arguments_are_no_part_of_a_schema():
    """What LangGraph injects the model never sees, bound or told."""

    @tool
    def tagged(number: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Look an order up."""
        return tool_call_id

    spec = Toolset.of([tagged]).specs[0]
    assert "tool_call_id" not in spec.parameters_json


def test_a_forced_tool_that_is_not_bound_opens_an_epoch():
    """A provider can force bound tools only."""

    class Forcing(Selecting):
        def wrap_model_call(
            self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
        ) -> ModelResponse[Any]:
            tools = self.rounds.pop(0)
            choice = "refund" if refund in tools else None
            return handler(request.override(tools=tools, tool_choice=choice))

    desk = Desk(tools=ALL, before=[Forcing([lookup], ALL)])
    desk.ask("Hello")
    assert "forced" in report(desk.ask("And?"))["reason"]
    assert desk.calls[1].names == ["cancel", "lookup", "refund"]
