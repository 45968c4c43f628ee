"""Requests as OpenAI-compatible servers take them, and what of them is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from agentkv.backends.base import Completion, PromptForm, Request, SamplingOptions
from agentkv.errors import CapabilityError, ConfigurationError
from agentkv.tokenizer import WireMessage

_ONE_ANSWER: Final = "one answer continues a conversation: fork the context and ask each fork"
_OURS: Final = "agentkv sets it"
_REFUSED: Final[Mapping[str, str]] = {
    "n": _ONE_ANSWER,
    "best_of": _ONE_ANSWER,
    "use_beam_search": _ONE_ANSWER,
    "prompt_logprobs": "vLLM computes the whole prompt anew for it; ask the server directly",
    "logprobs": "agentkv hands no log-probabilities on; ask the server directly",
    "top_logprobs": "agentkv hands no log-probabilities on; ask the server directly",
    "echo": "the prompt is known already",
    "truncate_prompt_tokens": "agentkv opens a new epoch before the window is full",
    "lora_request": "a LoRA adapter is served under a name of its own: give that name as the backend's model",
    "cache_salt": "agentkv makes it of the tenant and the salt key",
    **dict.fromkeys(
        (
            "model",
            "prompt",
            "prompt_embeds",
            "messages",
            "tools",
            "stream",
            "stream_options",
            "return_token_ids",
            "kv_transfer_params",
            "priority",
            "request_id",
            "add_special_tokens",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
        ),
        _OURS,
    ),
}
_NAMED: Final = frozenset(option.name for option in fields(SamplingOptions)) - {"extra"}


def check_extra(options: SamplingOptions, unsent: frozenset[str] = frozenset()) -> None:
    """Refuse parameters of the server that would break what agentkv promises.

    Parameters
    ----------
    unsent
        Options that this backend does not send, so that `extra` is the place for them.

    Raises
    ------
    CapabilityError
        The message names the parameter, why it is refused and what to do.
    ConfigurationError
        It is one of `SamplingOptions`' own.
    """
    for name in options.extra:
        if name in _REFUSED:
            raise CapabilityError(f"parameter {name!r} is refused: {_REFUSED[name]}")
        if name in _NAMED - unsent:
            raise ConfigurationError(f"extra holds {name!r}: give it as the option of that name")


def sampling(options: SamplingOptions) -> dict[str, Any]:
    """Return sampling parameters as every OpenAI-compatible server knows them."""
    body: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.seed is not None:
        body["seed"] = options.seed
    if options.stop:
        body["stop"] = list(options.stop)
    if options.response_format is not None:
        body["response_format"] = dict(options.response_format)
    return body


def vllm_sampling(options: SamplingOptions) -> dict[str, Any]:
    """Return sampling parameters for vLLM, where what is left out may be set by the model's own defaults."""
    return {
        **sampling(options),
        "top_k": options.top_k,
        "repetition_penalty": options.repetition_penalty,
    }


def tool_choice(name: str | None) -> Any:
    """Return a tool choice in OpenAI's form; None for what servers do without one."""
    if name in (None, "auto", "none"):
        # "none" may take the tools out of the prompt, so it is never sent: calls are then not looked for.
        return None
    if name == "required":
        return name
    return {"type": "function", "function": {"name": name}}


def chat_fields(request: Request) -> dict[str, Any]:
    """Return the messages and tools of a chat request."""
    body: dict[str, Any] = {"messages": [wire_message(message) for message in request.messages]}
    if request.rendered_tools:
        body["tools"] = [dict(tool) for tool in request.rendered_tools]
        choice = tool_choice(request.options.tool_choice)
        if choice is not None:
            body["tool_choice"] = choice
    return body


def wire_message(message: WireMessage) -> dict[str, Any]:
    """Return a message in the form that servers take: arguments of calls are JSON text."""
    made = dict(message)
    if made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def check_tool_choice(request: Request, prompts: PromptForm) -> None:
    """Refuse a choice of a tool that is not declared, or that the server cannot hold the model to.

    Raises
    ------
    ConfigurationError
        There is no such tool, or none at all.
    CapabilityError
        The server is sent messages, and the tools are part of their text.
    """
    asked = request.options.tool_choice
    if asked in (None, "auto", "none"):
        return
    names = [tool["function"]["name"] for tool in request.tools]
    if not names or (asked != "required" and asked not in names):
        known = ", ".join(names) or "none"
        raise ConfigurationError(f"tool_choice={asked!r}, but the declared tools are: {known}")
    if prompts is PromptForm.MESSAGES and not request.rendered_tools:
        raise CapabilityError(
            f"tool_choice={asked!r}: the chat template writes no tools, so they are part of the system text, "
            "and a server that is sent messages cannot hold the model to one"
        )


def read_by_server(request: Request, completion: Completion) -> Completion:
    """Return a chat endpoint's answer, whose calls the server has read if it was sent the tools.

    Where the tools are part of the system text, calls stand in the answer's text.
    """
    if request.rendered_tools and completion.tool_calls is None:
        return replace(completion, tool_calls=())
    return completion


def routing_value(request: Request) -> str:
    """Return the routing key as a header may hold it, whatever the conversation is called."""
    return hashlib.sha256((request.routing_key or request.conversation).encode()).hexdigest()[:32]
