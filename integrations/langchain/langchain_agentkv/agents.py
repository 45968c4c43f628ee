"""LangChain's `create_agent` with agentkv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentkv.costs import Costs
from agentkv.errors import ConfigurationError, MissingDependencyError
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.tokenizer import ChatTokenizer
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool

from langchain_agentkv.engine import AddedTools, Unsupported
from langchain_agentkv.wrapping import AgentKVChatModel

try:
    from langchain.agents import create_agent as create_plain_agent
    from langchain.agents.middleware.types import AgentMiddleware
except ImportError as error:
    raise MissingDependencyError(
        f"create_agent needs langchain and langgraph ({error}): pip install 'langchain-agentkv[agents]'"
    ) from error

from langchain_agentkv.middleware import AgentKVMiddleware


def create_agent(
    model: str | BaseChatModel,
    tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] | None = None,
    *,
    segments: Iterable[Any] = (),
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    profile: Profile = GENERIC,
    mode: Mode | str = Mode.ON,
    tokenizer: ChatTokenizer | None = None,
    unsupported_model_behavior: Unsupported = "warn",
    added_tools: AddedTools = "told",
    context_window: int | None = None,
    costs: Costs | None = None,
    **agent: Any,
) -> Any:
    """Return LangChain's agent with `AgentKVMiddleware` as its last middleware.

    Parameters
    ----------
    segments, profile, mode, tokenizer, unsupported_model_behavior, added_tools, context_window, costs
        As of `AgentKVMiddleware`.
    model, tools, middleware, agent
        As of ``langchain.agents.create_agent``.

    Raises
    ------
    ConfigurationError
        The middleware is among `middleware` already, or the model is wrapped.
    """
    if isinstance(model, AgentKVChatModel):
        raise ConfigurationError("the model is wrapped already: give create_agent the model itself")
    if any(isinstance(one, AgentKVMiddleware) for one in middleware):
        raise ConfigurationError("AgentKVMiddleware is given twice: create_agent adds it by itself")
    ours = AgentKVMiddleware(
        segments,
        profile=profile,
        mode=mode,
        tokenizer=tokenizer,
        unsupported_model_behavior=unsupported_model_behavior,
        added_tools=added_tools,
        context_window=context_window,
        costs=costs,
    )
    return create_plain_agent(model, tools, middleware=[*middleware, ours], **agent)
