"""Beside the middlewares of LangChain: right answers, reasons reported, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
    dynamic_prompt,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from langgraph.types import Command
from pydantic import BaseModel

from agents import Desk, lookup, report
from langchain_agentkv import AgentKVMiddleware
from scripted import Scripted, append_only, calling, extends, updates_in


def test_summarization_opens_an_epoch():
    """A summary in place of messages is another history; what is true is in the new prompt."""
    helper = Scripted(answers=["They said hello."])
    summary = SummarizationMiddleware(model=helper, trigger=("messages", 7), keep=("messages", 2))
    desk = Desk(before=[summary])
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    desk.ask("Really?")
    result = desk.ask("Well?")
    assert report(result)["reason"].startswith("the history changed")
    assert "Order status: lost" in desk.calls[-1].system
    assert "They said hello." in desk.calls[-1].texts[1]
    assert report(desk.ask("So?"))["reason"] == ""


def test_context_editing_opens_an_epoch():
    """Cleared tool results are another history, once."""
    editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    answers = [
        calling(("lookup", {"number": "7"})),
        "One.",
        calling(("lookup", {"number": "8"}), start=2),
        "Two.",
    ]
    desk = Desk(answers, before=[editing])
    desk.ask("Look 7 up")
    desk.order.status = "lost"
    result = desk.ask("Look 8 up")
    assert report(result)["reason"].startswith("the history changed behind its first 0 messages")
    assert "[cleared]" in desk.calls[-1].texts
    assert any("lost" in text for text in desk.calls[-1].texts)


class SelectorModel(Scripted):
    """Answers a selection by the names in `answers`."""

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        from langchain_core.runnables import RunnableLambda

        return RunnableLambda(lambda _: {"tools": self._next([], {}).text.split(",")})


def test_a_tool_selector_keeps_the_prefix():
    """Fewer tools are told as no longer there; more again are told again."""
    selector = LLMToolSelectorMiddleware(
        model=SelectorModel(answers=["lookup,cancel", "lookup", "lookup,cancel"])
    )
    desk = Desk(before=[selector])
    reasons = [report(desk.ask(text))["reason"] for text in ("Hello", "And?", "Well?")]
    assert reasons == ["first turn", "", ""]
    assert append_only(desk.calls) == [True, True]
    assert updates_in(desk.calls[1]) == ["Update 1: the tool 'cancel' no longer applies."]
    assert '"name": "cancel"' in desk.calls[2].texts[-1]


def test_a_dynamic_prompt_opens_epochs_and_says_why():
    """Where the system prompt is rewritten each call, each call is an epoch with that reason."""
    count = iter(range(9))

    @dynamic_prompt
    def prompt(request: ModelRequest[Any]) -> str:
        return f"It is minute {next(count)}."

    desk = Desk(before=[prompt])
    reasons = [report(desk.ask(text))["reason"] for text in ("Hello", "And?", "Well?")]
    assert reasons == ["first turn", "the system message changed", "the system message changed"]
    assert desk.calls[2].system.startswith("It is minute 2.")


def test_a_dynamic_prompt_that_stays_costs_nothing():
    """A function that returns the same text is no change."""

    @dynamic_prompt
    def prompt(request: ModelRequest[Any]) -> str:
        return "Always this."

    desk = Desk(before=[prompt])
    desk.ask("Hello")
    assert report(desk.ask("And?"))["reason"] == ""


def test_a_todo_list_keeps_the_prefix():
    """Its instructions and its tool are part of the prompt from the beginning."""
    todo = calling(("write_todos", {"todos": [{"content": "look", "status": "pending"}]}))
    desk = Desk([todo, "Noted.", "Yes."], before=[TodoListMiddleware()])
    desk.ask("Plan it")
    desk.order.status = "lost"
    desk.ask("And?")
    assert append_only(desk.calls) == [True, True]
    assert "write_todos" in desk.calls[0].names
    assert len(updates_in(desk.calls[2])) == 1


def test_redacted_input_and_output_keep_the_epoch():
    """PII: input is redacted before it is told; a redacted answer counts as edited."""
    pii = PIIMiddleware("email", strategy="redact", apply_to_input=True, apply_to_output=True)
    desk = Desk(["Write to a@example.com.", "Yes."], before=[pii])
    desk.ask("I am b@example.com")
    result = desk.ask("And?")
    assert "b@example.com" not in " ".join(desk.calls[0].texts)
    assert "a@example.com" not in " ".join(desk.calls[1].texts)
    assert report(result)["reason"] == ""
    assert report(result)["answer_edited"]
    assert extends(desk.calls[0], desk.calls[1])


@pytest.mark.parametrize("decision", ["approve", "edit", "reject"])
def test_a_human_decides_between_call_and_result(decision: str):
    """Approval, edit and rejection go on in the same epoch, and the erratum follows the round."""
    human = HumanInTheLoopMiddleware(interrupt_on={"cancel": True})
    desk = Desk([calling(("cancel", {"number": "7"})), "Done."], before=[human])
    desk.ask("Cancel 7")
    desk.order.status = "cancelled"
    answer: dict[str, Any] = {"type": decision}
    if decision == "edit":
        answer["edited_action"] = {"name": "cancel", "args": {"number": "8"}}
    result = desk.agent.invoke(Command(resume={"decisions": [answer]}), desk.config())
    assert result["messages"][-1].content == "Done."
    assert report(result)["reason"] == ""
    assert len(updates_in(desk.calls[1])) == 1
    assert extends(desk.calls[0], desk.calls[1])
    desk.ask("Thanks")
    assert append_only(desk.calls) == [True, True]


def test_a_retried_call_says_the_same():
    """Every attempt sends the same bytes, and one step is recorded."""
    retry = ModelRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False, on_failure="error")
    desk = Desk(["Hello.", RuntimeError("down"), RuntimeError("down"), "Again.", "Yes."], before=[retry])
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    desk.ask("Well?")
    assert len({tuple(call.texts) for call in desk.calls[1:4]}) == 1
    assert len(updates_in(desk.calls[-1])) == 1
    assert extends(desk.calls[3], desk.calls[4])
    log = desk.state()["agentkv_log"]
    assert [(record["kind"], record.get("calls", 1)) for record in log[1:]] == [("step", 1), ("step", 2)]


def test_another_model_opens_an_epoch():
    """A fallback to another model is another prompt, with its reason."""
    other = Scripted(answers=["From the other."], model_name="other")
    fallback = ModelFallbackMiddleware(other)
    desk = Desk(["Hello.", RuntimeError("down"), "Back."], before=[fallback])
    desk.ask("Hello")
    desk.order.status = "lost"
    result = desk.ask("And?")
    assert report(result)["reason"] == "the model changed"
    assert "Order status: lost" in other.calls[0].system
    assert report(desk.ask("Well?"))["reason"] == "the model changed"


def test_retried_tools_are_one_round():
    """A tool that is called again leaves one result."""
    desk = Desk([calling(("lookup", {"number": "7"})), "Known."], before=[ToolRetryMiddleware(max_retries=1)])
    desk.ask("Look 7 up")
    assert append_only(desk.calls) == [True]


def test_two_middlewares_with_their_own_state_do_not_meet():
    """Commands of other middlewares are kept beside ours."""

    class Counting(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(
            self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
        ) -> Any:
            from langchain.agents.middleware.types import ExtendedModelResponse

            extra = Command(update={"messages": [AIMessage("By the way.")]})
            return ExtendedModelResponse(model_response=handler(request), command=extra)

    desk = Desk(before=[Counting()])
    desk.ask("Hello")
    desk.order.status = "lost"
    result = desk.ask("And?")
    assert [m.content for m in result["messages"]][:3] == ["Hello", "Fine.", "By the way."]
    assert report_of_first(result)["reason"] == ""
    assert append_only(desk.calls) == [True]


def report_of_first(result: dict[str, Any]) -> dict[str, Any]:
    """Return the last report among a run's messages."""
    found = [m.response_metadata["agentkv"] for m in result["messages"] if "agentkv" in m.response_metadata]
    last: dict[str, Any] = found[-1]
    return last


class Verdict(BaseModel):
    """What came of it."""

    good: bool


def test_structured_output_by_tools_keeps_the_prefix():
    """The answer's tool and its result are part of the conversation."""
    answers = [calling(("Verdict", {"good": True})), calling(("Verdict", {"good": False}), start=2)]
    desk = Desk(answers, response_format=ToolStrategy(Verdict))
    assert desk.ask("Is it?")["structured_response"] == Verdict(good=True)
    desk.order.status = "lost"
    assert desk.ask("And now?")["structured_response"] == Verdict(good=False)
    assert append_only(desk.calls) == [True]
    assert len(updates_in(desk.calls[1])) == 1


def test_an_inner_middleware_may_stand_behind_ours():
    """Ours need not be last for right answers."""

    class Noting(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(
            self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
        ) -> ModelResponse[Any]:
            return handler(request)

    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    model = Scripted()
    agent = create_agent(
        model, [lookup], middleware=[AgentKVMiddleware([]), Noting()], checkpointer=InMemorySaver()
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [("user", "Hello")]}, config)
    agent.invoke({"messages": [("user", "And?")]}, config)
    assert append_only(model.calls) == [True]
