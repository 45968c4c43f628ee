"""agentkv for LangChain and LangGraph: agents that keep their prompt cached while their facts change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_agentkv._version import __version__
from langchain_agentkv.callbacks import AgentKVCallbackHandler, Session
from langchain_agentkv.chat_model import ChatAgentKV
from langchain_agentkv.fields import (
    FieldSource,
    Refresh,
    Scope,
    field,
    from_context,
    from_function,
    from_state,
    from_store,
    updates,
)
from langchain_agentkv.stores import GraphLedgerStore, LedgerStore, MemoryLedgerStore
from langchain_agentkv.wrapping import AgentKVChatModel, wrap

if TYPE_CHECKING:
    from langchain_agentkv.agents import create_agent
    from langchain_agentkv.chat_vllm import ChatVLLM
    from langchain_agentkv.middleware import AgentKVMiddleware

__all__ = [
    "AgentKVCallbackHandler",
    "AgentKVChatModel",
    "AgentKVMiddleware",
    "ChatAgentKV",
    "ChatVLLM",
    "FieldSource",
    "GraphLedgerStore",
    "LedgerStore",
    "MemoryLedgerStore",
    "Refresh",
    "Scope",
    "Session",
    "__version__",
    "create_agent",
    "field",
    "from_context",
    "from_function",
    "from_state",
    "from_store",
    "updates",
    "wrap",
]

_LAZY = {
    "AgentKVMiddleware": "langchain_agentkv.middleware",
    "ChatVLLM": "langchain_agentkv.chat_vllm",
    "create_agent": "langchain_agentkv.agents",
}
"""Names whose modules need more than LangChain's core."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
