"""A small support desk as a LangChain agent: what the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv import Policy, mutable, mutable_fields
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_agentkv import AgentKVMiddleware
from scripted import Call, Scripted


@mutable_fields
class Order:
    """What the prompt shows of an order."""

    status: str = mutable(label="Order status", default="in transit")
    eta: str = mutable(label="Estimated delivery", default="Monday")


@tool
def lookup(number: str) -> str:
    """Look an order up."""
    return f"Order {number} is known."


@tool
def cancel(number: str) -> str:
    """Cancel an order."""
    return f"Order {number} is cancelled."


@tool
def refund(number: str, amount: int) -> str:
    """Refund an order."""
    return f"{amount} refunded for {number}."


class Desk:
    """An agent with agentkv on a scripted model."""

    def __init__(
        self,
        answers: Sequence[Any] = (),
        *,
        segments: Sequence[Any] | None = None,
        tools: Sequence[Any] = (lookup, cancel),
        before: Sequence[Any] = (),
        checkpointer: Any = None,
        options: dict[str, Any] | None = None,
        model: Any = None,
        **agent: Any,
    ) -> None:
        self.order = Order()
        self.model = model or Scripted(answers=list(answers))
        self.middleware = AgentKVMiddleware(
            [Policy("You answer for a shop."), self.order] if segments is None else segments,
            **(options or {}),
        )
        self.agent = create_agent(
            self.model,
            list(tools),
            system_prompt=agent.pop("system_prompt", "Be kind."),
            middleware=[*before, self.middleware],
            checkpointer=checkpointer or InMemorySaver(),
            **agent,
        )

    @property
    def calls(self) -> list[Call]:
        return self.model.calls

    def config(self, thread: str = "1", **more: Any) -> Any:
        return {"configurable": {"thread_id": thread}, **more}

    def ask(self, text: str, thread: str = "1", **more: Any) -> dict[str, Any]:
        return self.agent.invoke({"messages": [("user", text)]}, self.config(thread, **more))

    async def aask(self, text: str, thread: str = "1", **more: Any) -> dict[str, Any]:
        return await self.agent.ainvoke({"messages": [("user", text)]}, self.config(thread, **more))

    def state(self, thread: str = "1") -> dict[str, Any]:
        return self.agent.get_state(self.config(thread)).values


def report(result: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run's last model call."""
    answers = [message for message in result["messages"] if isinstance(message, AIMessage)]
    found: dict[str, Any] = answers[-1].response_metadata["agentkv"]
    return found
