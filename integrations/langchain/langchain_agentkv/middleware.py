"""The middleware for LangChain's `create_agent`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from agentkv.costs import Costs
from agentkv.errors import MissingDependencyError
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.tokenizer import ChatTokenizer
from langchain_core.messages import AIMessage, AnyMessage

from langchain_agentkv.canonical import digest_of
from langchain_agentkv.engine import AddedTools, Engine, Prepared, Unsupported
from langchain_agentkv.exact import SETTINGS_KEY, token_exact
from langchain_agentkv.fields import Scope
from langchain_agentkv.models import forced_tool, identity, window_of
from langchain_agentkv.planning import Asked
from langchain_agentkv.recording import FROZEN_KEY, LOG_KEY
from langchain_agentkv.reporting import aemit, emit
from langchain_agentkv.toolset import Toolset

try:
    from langchain.agents.middleware.types import (
        AgentMiddleware,
        ExtendedModelResponse,
        ModelRequest,
        ModelResponse,
    )
    from langgraph.types import Command

    from langchain_agentkv.state import AgentKVState
except ImportError as error:
    raise MissingDependencyError(
        f"AgentKVMiddleware needs langchain and langgraph ({error}): pip install 'langchain-agentkv[agents]'"
    ) from error


class AgentKVMiddleware(AgentMiddleware[AgentKVState, Any, Any]):
    """Keeps an agent's prompt cached while its facts change.

    Give it last in ``create_agent(middleware=[...])``, so that it sees what the others made of a request. The
    system prompt and the tools stay those of the agent; segments and fields stand behind its system prompt.
    Facts that change are said once, in the newest message of the request; the graph's messages never hold
    them. What was told is kept in the graph's private state.

    Parameters
    ----------
    segments
        `Policy`, `Skill`, `Document` and `Field` of agentkv, instances of ``@mutable_fields`` classes, and
        the fields of `langchain_agentkv.fields`. One object can be shown to all threads of the agent.
    profile, mode, tokenizer, unsupported_model_behavior, added_tools, context_window, costs
        As of `langchain_agentkv.engine.Engine`.

    Raises
    ------
    ConfigurationError
        An option or a segment is wrong.
    """

    state_schema = AgentKVState

    def __init__(
        self,
        segments: Iterable[Any] = (),
        *,
        profile: Profile = GENERIC,
        mode: Mode | str = Mode.ON,
        tokenizer: ChatTokenizer | None = None,
        unsupported_model_behavior: Unsupported = "warn",
        added_tools: AddedTools = "told",
        context_window: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        super().__init__()
        self.engine = Engine(
            segments,
            profile=profile,
            mode=mode,
            tokenizer=tokenizer,
            unsupported_model_behavior=unsupported_model_behavior,
            added_tools=added_tools,
            context_window=context_window,
            costs=costs,
        )
        self.tools = []

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ExtendedModelResponse[Any]:
        """Send the planned request, and record what was told once it is answered."""
        window = window_of(request.model)
        exact = token_exact(request.model)
        prepared = self.engine.prepare(asked_of(request), _ledger(request), _scope(request), window, exact)
        start = time.perf_counter()
        response = handler(_overridden(request, prepared))
        made, report = _answered(prepared, response, time.perf_counter() - start)
        emit(report)
        return made

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ExtendedModelResponse[Any]:
        """As `wrap_model_call`, for asynchronous runs."""
        window = window_of(request.model)
        asked, state, scope = asked_of(request), _ledger(request), _scope(request)
        prepared = await self.engine.aprepare(asked, state, scope, window, token_exact(request.model))
        start = time.perf_counter()
        response = await handler(_overridden(request, prepared))
        made, report = _answered(prepared, response, time.perf_counter() - start)
        await aemit(report)
        return made


def asked_of(request: ModelRequest[Any]) -> Asked:
    """Return a request as it is planned."""
    return Asked(
        messages=tuple(request.messages),
        system=request.system_message,
        tools=Toolset.of(request.tools),
        model=identity(request.model),
        form="" if request.response_format is None else digest_of(_described(request.response_format)),
        forced=forced_tool(request.tool_choice),
    )


def _overridden(request: ModelRequest[Any], prepared: Prepared) -> ModelRequest[Any]:
    settings = dict(request.model_settings)
    if prepared.settings:
        settings[SETTINGS_KEY] = dict(prepared.settings)
    return request.override(
        system_message=prepared.system,
        messages=cast("list[AnyMessage]", list(prepared.messages)),
        tools=list(prepared.tools),
        model_settings=settings,
    )


def _answered(
    prepared: Prepared, response: ModelResponse[Any], seconds: float
) -> tuple[ExtendedModelResponse[Any], dict[str, Any]]:
    """Return the response with its report and what is to be recorded."""
    for place, answer in enumerate(response.result):
        if isinstance(answer, AIMessage):
            done = prepared.answered(answer, seconds)
            result = [*response.result[:place], done.answer, *response.result[place + 1 :], *done.refused]
            made = ModelResponse(result=result, structured_response=response.structured_response)
            command: Command[Any] | None = Command(update=done.update) if done.update else None
            return ExtendedModelResponse(model_response=made, command=command), done.report
    return ExtendedModelResponse(model_response=response), {}


def _ledger(request: ModelRequest[Any]) -> dict[str, Any]:
    state: Any = request.state
    return {key: state.get(key) for key in (FROZEN_KEY, LOG_KEY)}


def _scope(request: ModelRequest[Any]) -> Scope:
    runtime = request.runtime
    state: Any = request.state
    return Scope(
        state=state,
        context=getattr(runtime, "context", None),
        store=getattr(runtime, "store", None),
        runtime=runtime,
    )


def _described(form: object) -> object:
    schema = getattr(form, "schema", form)
    specs = getattr(form, "schema_specs", None)
    if specs is not None:
        return [type(form).__name__, [[spec.name, spec.json_schema] for spec in specs]]
    spec = getattr(form, "schema_spec", None)
    if spec is not None:
        return [type(form).__name__, spec.name, spec.json_schema]
    named = getattr(schema, "__qualname__", None)
    shape = getattr(schema, "model_json_schema", None)
    return [type(form).__name__, named or schema, shape() if callable(shape) else None]
