"""A desk that answers, and a reviewer with tools that reads the same conversation to check the answer.

Both use one wrapped model, so both prompts have one beginning. Before the reviewer starts, its thread is
given a copy of what the desk's thread was told: its first prompt is the desk's last one, with the answer and
the task behind it, and all of that is cached. What the reviewer does stays in its own thread; the desk goes
on from its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NotRequired

from langchain_agentkv import LedgerStore, MemoryLedgerStore, wrap
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

TASK: Final = (
    "Check your last answer against the case and the rules. Say in one sentence whether it is right."
)


class DeskState(MessagesState):
    """The conversation, and what the reviewer said of each answer."""

    review: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Desk:
    """The compiled graph, and where its threads' ledgers are kept."""

    graph: Any
    ledgers: LedgerStore

    def ask(self, thread: str, question: str, *, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
        """Run one turn of a conversation; returns the graph's state."""
        config = {"configurable": {"thread_id": thread}, "callbacks": list(callbacks)}
        found: dict[str, Any] = self.graph.invoke({"messages": [HumanMessage(question)]}, config)
        return found


def build(
    model: BaseChatModel,
    segments: Sequence[Any],
    tools: Sequence[BaseTool],
    *,
    ledgers: LedgerStore | None = None,
) -> Desk:
    """Build the graph: the desk answers, then the reviewer checks.

    Parameters
    ----------
    model
        Any chat model.
    segments
        What both are told: policies, skills, fields.
    tools
        Of both: with other tools the beginning of a prompt would be another one.
    ledgers
        Where what was told is kept, thread by thread; None keeps it in memory.
    """
    kept = ledgers or MemoryLedgerStore()
    bound = wrap(model, segments, ledger_store=kept).bind_tools(tools)

    def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"], config)]}

    loop = StateGraph(MessagesState)
    loop.add_node("think", think)
    loop.add_node("tools", ToolNode(list(tools)))
    loop.add_edge(START, "think")
    loop.add_conditional_edges("think", tools_condition)
    loop.add_edge("tools", "think")
    reviewer = loop.compile(checkpointer=False)

    def review(state: DeskState, config: RunnableConfig) -> dict[str, Any]:
        thread = str(config["configurable"]["thread_id"])
        own = f"{thread}/review/{len(state['messages'])}"
        kept.write(own, kept.read(thread))
        messages: list[AnyMessage] = [*state["messages"], HumanMessage(TASK)]
        done = reviewer.invoke({"messages": messages}, {"configurable": {"thread_id": own}})
        return {"review": str(done["messages"][-1].text)}

    graph = StateGraph(DeskState)
    graph.add_node("desk", think)
    graph.add_node("tools", ToolNode(list(tools)))
    graph.add_node("reviewer", review)
    graph.add_edge(START, "desk")
    graph.add_conditional_edges("desk", tools_condition, {"tools": "tools", END: "reviewer"})
    graph.add_edge("tools", "desk")
    graph.add_edge("reviewer", END)
    return Desk(graph.compile(checkpointer=InMemorySaver()), kept)
