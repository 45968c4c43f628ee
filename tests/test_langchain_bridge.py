"""`wrap` and `create_agent` of the contexts, as far as they need no LangChain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext
from agentkv.errors import MissingDependencyError
from agentkv.testing import ScriptedBackend


@pytest.mark.parametrize("context", [AgentKVContext, AsyncAgentKVContext])
@pytest.mark.parametrize(
    "call", [lambda ctx: ctx.wrap(None), lambda ctx: ctx.create_agent(None, [])], ids=["wrap", "create_agent"]
)
@pytest.mark.parametrize("missing", ["langchain_agentkv", "langchain_agentkv.contexts"])
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, context: Any, call: Callable[[Any], object], missing: str
) -> None:
    """The message says which distribution to install."""
    monkeypatch.delitem(sys.modules, "langchain_agentkv.contexts", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'langchain-agentkv\[agents\]'"):
        call(context(ScriptedBackend()))
