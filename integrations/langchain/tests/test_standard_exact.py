"""LangChain's standard tests for chat models, on token ids."""

from __future__ import annotations

import json
import re
from typing import Any

from agentkv.backends.base import Request
from agentkv.testing import ByteTokenizer, ScriptedBackend
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_agentkv import ChatAgentKV
from stub import ANSWER, sample


def sensible(request: Request) -> str:
    """Answer as a well-behaved model would: call a tool where one is asked for."""
    prompt = ByteTokenizer().decode(request.ids.tolist())
    last = prompt.rpartition("user\n")[2]
    choice = request.options.tool_choice
    answered = "tool\n" in last
    wanted = choice in ("required", *(tool["function"]["name"] for tool in request.tools))
    if not request.tools or choice == "none" or not (wanted or ("?" in last and not answered)):
        return ANSWER
    named = [tool["function"] for tool in request.tools if tool["function"]["name"] == choice]
    function = (named or [request.tools[0]["function"]])[0]
    arguments = sample(function["parameters"], function["parameters"])
    other = re.search(r"[^\x00-\x7f]+", last)
    if other:
        arguments = {key: other.group() if value == "text" else value for key, value in arguments.items()}
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"


class TestChatAgentKVUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"backend": ScriptedBackend()}


class TestChatAgentKVIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"backend": ScriptedBackend([sensible])}
