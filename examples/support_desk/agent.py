"""The support desk as a LangChain agent: the same policy and database, with tools that change the order.

The order's row is read before every model call, so it makes no difference who changed it: a tool of the
agent, or the world outside. `AgentKVMiddleware` stands last and says what changed, in the newest message.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_agentkv import (
    AgentKVCallbackHandler,
    AgentKVMiddleware,
    ChatAgentKV,
    FieldSource,
    from_function,
    updates,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field
from rich.console import Console

from agentkv import Inline, Mode, Policy, Skill
from agentkv.backends.base import Backend
from benchmarks._environment import environment
from examples.support_desk.database import (
    LABELS,
    Column,
    OrderNotFoundError,
    OrderRow,
    fetch_order,
    open_database,
    update_order,
)
from examples.support_desk.policy import POLICY, RETURNS
from examples.support_desk.script import Probe, RowUpdate, reports

CALL_TOKENS: Final = 64
"""Most tokens of an answer; a tool's call is one too."""

OrderNumber = Annotated[str, Field(pattern=r"^LO-[0-9]{5}$", description="Such as LO-48213")]
Address = Annotated[
    str,
    Field(pattern=r"^[0-9]{1,3} [A-Z][A-Za-z ]{3,24}, [A-Z][a-z]{3,14}$", description="House, street, town"),
]


def chat_model(backend: Backend) -> ChatAgentKV:
    """Return a chat model on a backend, here or on a server."""
    return ChatAgentKV(backend=backend, max_tokens=CALL_TOKENS)


@dataclass(frozen=True, slots=True)
class Shop:
    """The shop's database and the open order; each use opens a connection, in whatever thread it is."""

    path: Path
    order_id: str

    def row(self, number: str | None = None) -> OrderRow:
        """Read an order; the open one if none is named."""
        with closing(open_database(self.path)) as connection:
            return fetch_order(connection, number or self.order_id)

    def update(self, column: Column, value: str) -> None:
        """Change the open order."""
        with closing(open_database(self.path)) as connection:
            update_order(connection, self.order_id, column, value)

    def value(self, key: str) -> str:
        """Return the current value of a field."""
        return self.row().fields()[key]

    def fields(self) -> list[FieldSource]:
        """Return what the agent sees of the open order: read from its row before every model call."""
        return [from_function(key, partial(self.value, key), label=label) for key, label in LABELS.items()]


def make_tools(shop: Shop) -> list[BaseTool]:
    """Return what the agent can do; `updates` says which fields a tool changes."""

    @tool
    def look_up_order(number: OrderNumber) -> str:
        """Look an order of the customer up: who carries it, and when it is expected."""
        try:
            row = shop.row(number)
        except OrderNotFoundError as error:
            return str(error)
        return f"{row.id}: {row.carrier}, expected {row.eta}"

    @updates("order.address")
    @tool
    def change_address(address: Address) -> str:
        """Change where the open order is sent."""
        shop.update(Column.ADDRESS, address)
        return "The address is saved."

    @updates("order.status")
    @tool
    def cancel_order() -> str:
        """Cancel the open order."""
        shop.update(Column.STATUS, "cancelled")
        return "The order is cancelled."

    return [look_up_order, change_address, cancel_order]


@dataclass(frozen=True, slots=True)
class AgentStep:
    """One turn of the agent's script."""

    question: str
    changes: tuple[RowUpdate, ...] = ()
    """Changes that the world makes before the question."""
    tool: str = ""
    """Name of the tool that is called in this turn; empty leaves it to the model."""
    probe: Probe | None = None
    """How the answer is judged; None where there is nothing to judge."""


AGENT_SCRIPT: Final = (
    AgentStep("What is the order status?"),
    AgentStep(
        "What is the order status?",
        changes=(RowUpdate(Column.STATUS, "held at customs"),),
        probe=Probe("order.status", new_value="held at customs", old_value="in transit"),
    ),
    AgentStep("Who carries my order LO-48213?", tool="look_up_order"),
    AgentStep("Send it to 9 Orchard Street, Penmoor.", tool="change_address"),
    AgentStep("What is the delivery address?"),
    AgentStep(
        "What is the estimated delivery?",
        changes=(RowUpdate(Column.ETA, "Friday 7 March"),),
        probe=Probe("order.eta", new_value="Friday 7 March", old_value="Tuesday 4 March"),
    ),
    AgentStep("Cancel it, please.", tool="cancel_order"),
    AgentStep(
        "What is the order status?",
        probe=Probe("order.status", new_value="cancelled", old_value="held at customs"),
    ),
)
"""The status changes twice: once in the world, once by a tool."""


class NamedTool(AgentMiddleware[Any, Any, Any]):
    """Has the model call the tool that the script names: a small model calls none by itself."""

    name_of_tool: str = ""

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Force the tool in the first call of a turn."""
        return handler(self._forced(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        return await handler(self._forced(request))

    def _forced(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if self.name_of_tool and isinstance(request.messages[-1], HumanMessage):
            return request.override(tool_choice=self.name_of_tool)
        return request


class AgentDesk:
    """One open case as an agent with a conversation of its own.

    Parameters
    ----------
    model
        Any chat model.
    checkpointer
        Where the conversation and what the model was told are kept; None keeps them in memory.
    """

    def __init__(
        self, model: BaseChatModel, shop: Shop, mode: Mode = Mode.ON, *, checkpointer: Any = None
    ) -> None:
        self._named = NamedTool()
        segments = [Policy(Inline(POLICY)), Skill("returns", RETURNS), *shop.fields()]
        self._agent = create_agent(
            model,
            make_tools(shop),
            middleware=[self._named, AgentKVMiddleware(segments, mode=mode)],
            checkpointer=checkpointer or InMemorySaver(),
        )
        self._config: Any = {"configurable": {"thread_id": shop.order_id}}
        self.handler = AgentKVCallbackHandler()
        """Collects the report of every model call."""

    def ask(self, question: str, tool_name: str = "") -> list[AIMessage]:
        """Run one turn; returns what the model wrote in it, a message for each call."""
        self._named.name_of_tool = tool_name
        asked = HumanMessage(question, id=uuid.uuid4().hex)
        config: Any = {**self._config, "callbacks": [self.handler]}
        messages = self._agent.invoke({"messages": [asked]}, config)["messages"]
        start = next(place for place, one in enumerate(messages) if one.id == asked.id)
        return [one for one in messages[start:] if isinstance(one, AIMessage)]


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn, as it went."""

    turn: int
    question: str
    called: tuple[str, ...]
    """Each call as the model made it."""
    answer: str
    reports: tuple[dict[str, Any], ...]
    """The report of each model call."""
    reports_new: bool | None
    """Whether the answer states the value that is true; None where nothing is judged."""


def run_agent(
    model: BaseChatModel, shop: Shop, console: Console, steps: Sequence[AgentStep] = AGENT_SCRIPT
) -> dict[str, Any]:
    """Run the script; prints each turn, and returns ``{"environment", "turns", "summary"}``."""
    desk = AgentDesk(model, shop)
    turns: list[AgentTurn] = []
    for step in steps:
        for change in step.changes:
            shop.update(change.column, change.value)
        turns.append(_turn(len(turns) + 1, step, desk.ask(step.question, step.tool)))
        _print_turn(turns[-1], console)
    session = desk.handler.session
    console.print(f"\n{session}", highlight=False, markup=False)
    return {
        "environment": environment(model=model._llm_type),
        "turns": [asdict(turn) for turn in turns],
        "summary": {
            "calls": session.calls,
            "errata": session.errata,
            "epochs": session.epochs,
            "prompt_tokens": session.prompt_tokens,
            "cached_tokens": session.cached_tokens,
            "new_values_reported": sum(bool(turn.reports_new) for turn in turns),
            "judged_turns": sum(turn.reports_new is not None for turn in turns),
        },
    }


def _turn(number: int, step: AgentStep, messages: Sequence[AIMessage]) -> AgentTurn:
    called = [f"{call['name']}({call['args']})" for one in messages for call in one.tool_calls]
    answer = str(messages[-1].text)
    return AgentTurn(
        turn=number,
        question=step.question,
        called=tuple(called),
        answer=answer,
        reports=tuple(one.response_metadata["agentkv"] for one in messages),
        reports_new=None if step.probe is None else reports(answer, step.probe.new_value),
    )


def _print_turn(turn: AgentTurn, console: Console) -> None:
    console.print(f"[bold]{turn.turn:2}. {turn.question}[/bold]", highlight=False)
    for call in turn.called:
        console.print(f"    calls:  {call}", highlight=False, markup=False)
    for report in turn.reports:
        because = (
            f" (changed by {', '.join(report['changed_by'].values())})" if report.get("changed_by") else ""
        )
        console.print(
            f"    report: {report['plan']}{because}; {report['cached_tokens']} of {report['prompt_tokens']} "
            f"prompt tokens cached, {report['duration_s']:.2f} s",
            highlight=False,
            markup=False,
        )
    console.print(f"    answer: {turn.answer.strip()}", highlight=False, markup=False)
