"""The three arms: one agent, one tool, and a way each to tell the model what is true."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_agentkv import AgentKVMiddleware, ChatAgentKV, from_function, updates
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from agentkv import Inline, Mode, Policy
from agentkv.backends.base import Backend
from benchmarks._workload import LABELS
from benchmarks.agent.plan import APPEND_STATE, ARMS
from benchmarks.agent.record import AgentCall, NoteTaker
from benchmarks.agent.workload import AgentTurn, Topic, World, listed, written
from benchmarks.serving.record import Recorder

TOOL: Final = "ask_depot"


class First(AgentMiddleware[Any, Any, Any]):
    """The outermost middleware: notes when a call begins, and forces the tool where a turn calls for it."""

    def __init__(self, world: World, notes: NoteTaker) -> None:
        super().__init__()
        self._world = world
        self._notes = notes

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Pass the call on."""
        self._notes.begin(perf_counter())
        turn = self._world.turn
        if turn is not None and turn.calls_tool and isinstance(request.messages[-1], HumanMessage):
            return handler(request.override(tool_choice=TOOL))
        return handler(request)


class AgentArm:
    """One agent in one conversation; its prefix cache is its own.

    Parameters
    ----------
    mode
        Of the middleware, in the arm agentkv.
    """

    def __init__(self, name: str, backend: Backend, text: Inline, answer_tokens: int, mode: Mode) -> None:
        self._world = World()
        self._notes = NoteTaker()
        self._recorder = Recorder(backend)
        self._appends = name == APPEND_STATE
        shown, middleware = _informed(name, text, self._world, mode)
        tenant = f"{name}-{uuid.uuid4().hex}"
        self._agent = create_agent(
            ChatAgentKV(backend=self._recorder, tenant=tenant, max_tokens=answer_tokens),
            [_tool(self._world, appends=self._appends)],
            system_prompt=shown,
            middleware=[First(self._world, self._notes), *middleware],
            checkpointer=InMemorySaver(),
        )

    def turn(self, turn: AgentTurn) -> list[AgentCall]:
        """Run one turn; returns its model calls."""
        self._world.begin(turn)
        text = f"{listed(self._world.values)}\n\n{turn.question}" if self._appends else turn.question
        before = len(self._recorder.calls)
        config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [self._notes]}
        self._agent.invoke({"messages": [HumanMessage(text)]}, config)
        calls = zip(self._notes.take(), self._recorder.calls[before:], strict=True)
        return [AgentCall(note, sent) for note, sent in calls]


def _informed(
    name: str, text: Inline, world: World, mode: Mode
) -> tuple[str | None, Sequence[AgentMiddleware[Any, Any, Any]]]:
    """Return an arm's system prompt, and its middleware."""
    match name:
        case "agentkv":
            fields = [from_function(key, partial(_value, world, key), label=LABELS[key]) for key in LABELS]
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
