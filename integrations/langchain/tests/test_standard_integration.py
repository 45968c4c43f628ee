"""LangChain's standard integration tests for chat models, against a stub that speaks vLLM's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_agentkv.chat_vllm import ChatVLLM
from stub import VLLMStub


class TestChatVLLMIntegration(ChatModelIntegrationTests):
    url: ClassVar[str] = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls) -> Iterator[None]:
        with VLLMStub() as stub:
            cls.url = stub.url
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatVLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "stub", "base_url": self.url}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another"

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": [], "stream": []}
