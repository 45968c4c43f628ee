"""A chat model on a vLLM server's chat endpoint, which keeps what the model wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from agentkv.backends.plain import PlainTokenizer
from agentkv.errors import ConfigurationError, MissingDependencyError
from agentkv.salts import Namespace, salt
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field, SecretBytes, model_validator
from pydantic.v1 import BaseModel as BaseModelV1

from langchain_agentkv.replay import (
    CALLS,
    REASONING,
    demoted,
    raw_calls,
    reasoning_of,
    wire_message,
    without_odd_calls,
)
from langchain_agentkv.structured import parsed_by, structured_arguments

try:
    from langchain_openai.chat_models.base import BaseChatOpenAI
except ImportError as error:
    raise MissingDependencyError(
        f"ChatVLLM needs langchain-openai ({error}): pip install 'langchain-agentkv[vllm]'"
    ) from error

_KEY = "VLLM_API_KEY"
"""Environment variable with the server's key; OpenAI's own key is never sent to another server."""
_NO_KEY = "EMPTY"
_IDS = "token_ids"


class ChatVLLM(BaseChatOpenAI):
    """A model on a vLLM server, by its chat endpoint.

    What the model wrote is sent again as it wrote it: contents in one form, thoughts, and the arguments of
    tool calls byte for byte. ``usage_metadata["input_token_details"]["cache_read"]`` holds the cached tokens
    (the server needs ``--enable-prompt-tokens-details``), ``response_metadata["token_ids"]`` those that were
    generated. Works with `AgentKVMiddleware`, `wrap`, and alone.

    ::

        model = ChatVLLM(model="Qwen/Qwen3-8B", base_url="http://127.0.0.1:8000")
    """

    stream_usage: bool | None = True
    """Whether streams report their tokens."""
    use_responses_api: bool | None = False
    cache_salt: str | None = None
    """Partition of the server's prefix cache; requests of different salts never share KV. None derives it
    from `tenant` where there is a `salt_key`, else sends none."""
    tenant: str = "default"
    """Whose conversations these are."""
    salt_key: SecretBytes | None = None
    """Secret of at least 16 bytes that salts are made with."""
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as ``{"enable_thinking": False}``."""
    priority: int | None = None
    """Scheduling priority, lower is sooner; the server needs ``--scheduling-policy priority``."""
    return_token_ids: bool = True
    """Whether to ask for the ids that were generated."""

    @model_validator(mode="before")
    @classmethod
    def _for_vllm(cls, values: Any) -> Any:
        """Set what differs from OpenAI's own server: its address and its key."""
        if not isinstance(values, dict):
            return values
        made = dict(values)
        if not any(made.get(name) for name in ("api_key", "openai_api_key")):
            made["api_key"] = os.environ.get(_KEY) or _NO_KEY
        name = "openai_api_base" if made.get("openai_api_base") else "base_url"
        url = str(made.get(name) or "http://127.0.0.1:8000").rstrip("/")
        made[name] = url if url.endswith("/v1") else f"{url}/v1"
        return made

    @model_validator(mode="after")
    def _salted(self) -> Self:
        """Make the salt of the tenant."""
        if self.cache_salt is None and self.salt_key is not None:
            key = self.salt_key.get_secret_value()
            self.cache_salt = salt(key, tenant=self.tenant, namespace=Namespace.EXACT)
        if self.cache_salt == "":
            raise ConfigurationError("cache_salt is empty, which servers refuse: give a text or None")
        return self

    def for_tenant(self, tenant: str, salt_key: bytes) -> Self:
        """Return the same model for another tenant, whose conversations never share KV with this one's."""
        made = salt(salt_key, tenant=tenant, namespace=Namespace.EXACT)
        change = {"tenant": tenant, "salt_key": SecretBytes(salt_key), "cache_salt": made}
        return self.model_copy(update=change)

    @property
    def _llm_type(self) -> str:
        return "agentkv-vllm"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Secrets that are never serialised, and where they come from."""
        return {"openai_api_key": _KEY}

    def _resolve_model_profile(self) -> Any:
        # OpenAI's list says nothing of models that vLLM serves.
        return None

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        own = kwargs.pop("extra_body", None)
        messages = self._convert_input(input_).to_messages()
        payload: dict[str, Any] = super()._get_request_payload(messages, stop=stop, **kwargs)
        wires = payload.get("messages", ())
        payload["messages"] = [wire_message(m, wire) for m, wire in zip(messages, wires, strict=True)]
        payload["extra_body"] = self._extra_body(own)
        return payload

    def _extra_body(self, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return vLLM's own parameters: the model's, then the instance's, then the call's."""
        ours = {
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "return_token_ids": self.return_token_ids or None,
            "chat_template_kwargs": dict(self.chat_template_kwargs) or None,
        }
        made: dict[str, Any] = {key: value for key, value in ours.items() if value is not None}
        for given in (self.extra_body or {}, own or {}):
            template = {**made.get("chat_template_kwargs", {}), **given.get("chat_template_kwargs", {})}
            made = {**made, **given, **({"chat_template_kwargs": template} if template else {})}
        return made

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        told = response if isinstance(response, dict) else _dumped(response)
        choices = told.get("choices") or []
        kept = [_message(choice) for choice in choices]
        split = [without_odd_calls(message.get("tool_calls") or ()) for message in kept]
        plain = [
            {**choice, "message": {**message, "tool_calls": good or None}}
            for choice, message, (good, _) in zip(choices, kept, split, strict=True)
        ]
        result = super()._create_chat_result({**told, "choices": plain} if choices else told, generation_info)
        for made, choice, message, (_, bad) in zip(result.generations, choices, kept, split, strict=False):
            answer = made.message
            if isinstance(answer, AIMessage):
                answer.invalid_tool_calls = [*answer.invalid_tool_calls, *bad]
                answer.additional_kwargs.update(_kept(message))
                if choice.get(_IDS):
                    answer.response_metadata[_IDS] = list(choice[_IDS])
        _with_parsed(result, response)
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        choices = chunk.get("choices") or (chunk.get("chunk") or {}).get("choices") or ()
        if made is None or not choices or not isinstance(made.message, AIMessageChunk):
            return made
        made.message.additional_kwargs.update(_kept(choices[0].get("delta") or {}))
        ids = choices[0].get(_IDS)
        if ids:
            made.message.response_metadata[_IDS] = list(ids)
        return made

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; calls whose arguments are no JSON object are invalid calls, streamed or not."""
        return demoted(super().invoke(input, config, stop=stop, **kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """As `invoke`."""
        return demoted(await super().ainvoke(input, config, stop=stop, **kwargs))

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers have a schema; by default vLLM's grammar holds it to it.

        Arguments as of ``langchain_openai.ChatOpenAI.with_structured_output``.
        """
        if method == "json_schema" and isinstance(schema, type):
            if issubclass(schema, BaseModel):
                model = self.bind(**structured_arguments(schema, strict=strict), **kwargs)
                return parsed_by(PydanticOutputParser(pydantic_object=schema), model, include_raw=include_raw)
            if issubclass(schema, BaseModelV1):
                # Its JSON schema is of an older draft, which grammars do not know.
                method = "function_calling"
        return super().with_structured_output(
            schema, method=method, include_raw=include_raw, strict=strict, **kwargs
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Return estimated token ids: good for counting, known to no model."""
        return PlainTokenizer().encode(text)

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | Any] | None = None,
        **kwargs: Any,
    ) -> int:
        """Estimate the tokens of a prompt, without a download; see `agentkv.backends.plain`."""
        tokenizer = PlainTokenizer()
        payload = self._get_request_payload(list(messages))
        texts = [f"{message['role']}\n{message['content']}" for message in payload["messages"]]
        texts += [str(convert_to_openai_tool(tool)) for tool in tools or ()]
        return sum(len(tokenizer.encode(text)) + 4 for text in texts)


def _dumped(response: Any) -> dict[str, Any]:
    # What was parsed may be any object; it is put back at the end.
    made: dict[str, Any] = response.model_dump(
        exclude={"choices": {"__all__": {"message": {"parsed"}}}}, warnings=False
    )
    return made


def _message(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    message: Mapping[str, Any] = choice.get("message") or {}
    return message


def _kept(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what LangChain's own conversion leaves out of a message or delta."""
    calls, thought = raw_calls(message.get("tool_calls")), reasoning_of(message)
    return {**({CALLS: calls} if calls else {}), **({REASONING: thought} if thought else {})}


def _with_parsed(result: ChatResult, response: Any) -> None:
    choices = getattr(response, "choices", None)
    if not choices or not result.generations:
        return
    message = choices[0].message
    for name in ("parsed", "refusal"):
        if hasattr(message, name):
            result.generations[0].message.additional_kwargs[name] = getattr(message, name)
