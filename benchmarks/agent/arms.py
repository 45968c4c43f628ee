"""The three arms: one agent, one tool, and a way each to tell the model what is true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from agentkv import Inline, Mode, Policy
from benchmarks._workload import LABELS
from benchmarks.agent.plan import AGENTKV, APPEND_STATE, ARMS, DYNAMIC_PROMPT
from benchmarks.agent.record import Call, CallRecorder
from benchmarks.agent.workload import AgentTurn, Topic, World, listed, written
from langchain_agentkv import AgentKVMiddleware, from_function, updates

TOOL = "ask_depot"


class First(AgentMiddleware[Any, Any, Any]):
    """The outermost middleware: notes when a call begins, and forces the tool where a turn calls for it."""

    def __init__(self, world: World, recorder: CallRecorder) -> None:
        super().__init__()
        self._world = world
        self._recorder = recorder

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Pass the call on."""
        turn = self._world.turn
        forced = bool(turn and turn.calls_tool and isinstance(request.messages[-1], HumanMessage))
        self._recorder.begin(perf_counter(), forced=forced)
        return handler(request.override(tool_choice=TOOL) if forced else request)


class AgentArm:
    """One agent in one conversation."""

    def __init__(self, name: str, model: BaseChatModel, text: Inline, mode: Mode) -> None:
        self._world = World()
        self._recorder = CallRecorder()
        self._appends = name == APPEND_STATE
        shown, middleware = _informed(name, text, self._world, mode)
        self._agent = create_agent(
            model,
            [_tool(self._world, appends=self._appends)],
            system_prompt=shown,
            middleware=[First(self._world, self._recorder), *middleware],
            checkpointer=InMemorySaver(),
        )

    def turn(self, turn: AgentTurn) -> list[Call]:
        """Run one turn; returns its model calls."""
        self._world.begin(turn)
        text = f"{listed(self._world.values)}\n\n{turn.question}" if self._appends else turn.question
        config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [self._recorder]}
        self._agent.invoke({"messages": [HumanMessage(text)]}, config)
        return self._recorder.take()


def _informed(
    name: str, text: Inline, world: World, mode: Mode
) -> tuple[str | None, Sequence[AgentMiddleware[Any, Any, Any]]]:
    """Return an arm's system prompt, and its middleware."""
    match name:
        case "agentkv":
            fields = [
                from_function(key, partial(_value, world, key), label=label) for key, label in LABELS.items()
            ]
            return None, [AgentKVMiddleware([Policy(text), *fields], mode=mode)]
        case "dynamic_prompt":

            @dynamic_prompt
            def current(request: ModelRequest[Any]) -> str:
                return written(text, world.values)

            return None, [current]
        case "append_state":
            return written(text, None), []
    raise ValueError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")


def _value(world: World, key: str) -> str:
    return world.values[key]


def _tool(world: World, *, appends: bool) -> BaseTool:
    @updates(*LABELS)
    @tool
    def ask_depot(about: Topic) -> str:
        """Ask the depot for news of this case."""
        world.ask_depot()
        answer = "The depot has answered, and the case is up to date."
        return f"{answer}\n\n{listed(world.values)}" if appends else answer

    return ask_depot


__all__ = ["AGENTKV", "APPEND_STATE", "ARMS", "DYNAMIC_PROMPT", "AgentArm"]
