"""LangChain's standard unit tests for chat models."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_agentkv.chat_vllm import ChatVLLM


class TestChatVLLMUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatVLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "stub", "base_url": "http://127.0.0.1:9/v1", "api_key": "secret"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"VLLM_API_KEY": "from the environment"},
            {"model": "stub"},
            {"openai_api_key": "from the environment"},
        )
