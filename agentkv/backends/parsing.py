"""Tool calls of a served model: asked of the server's own parsers, or held to a form that is read here.

With vLLM's scale-out endpoints the server's own parsers do the work: ``render`` gives the grammar of a tool
choice, ``derender`` reads calls and reasoning out of generated ids. Without them a forced call is held to one
JSON object with ``name`` and ``arguments``, and calls and reasoning are read by `agentkv.tools.parse_calls`
and `agentkv.reasoning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from agentkv.backends.answers import AnswerReader
from agentkv.backends.base import RawToolCall, Request
from agentkv.backends.bodies import tool_choice
from agentkv.tools import parse_calls

RENDER: Final = "/v1/chat/completions/render"
DERENDER: Final = "/v1/chat/completions/derender"
_TAIL: Final = 64
"""Prompt ids that the server's parser is shown: enough to see whether the prompt opened a block."""


def chat_request(model: str, request: Request) -> dict[str, Any]:
    """Return a chat request that stands for ours: its tools and choice count, its message does not."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "…"}]}
    if request.template_arguments:
        body["chat_template_kwargs"] = dict(request.template_arguments)
    if request.tools and request.options.tool_choice != "none":
        choice = tool_choice(request.options.tool_choice)
        # The prompt is our own: being strict changes the grammar of a forced call and nothing else.
        strict = {} if choice is None else {"strict": True}
        body["tools"] = [{**tool, "function": {**tool["function"], **strict}} for tool in request.tools]
        if choice is not None:
            body["tool_choice"] = choice
    return body


def rendered_grammar(answer: Any) -> dict[str, Any] | None:
    """Return the structured-output parameters that ``render`` gave for a tool choice."""
    parameters = answer.get("sampling_params") if isinstance(answer, Mapping) else None
    found = (parameters or {}).get("structured_outputs")
    if not isinstance(found, Mapping):
        return None
    return {key: value for key, value in found.items() if value is not None and not key.startswith("_")}


def local_grammar(request: Request) -> dict[str, Any]:
    """Return structured-output parameters that hold an answer to one call, as a bare JSON object."""
    asked = request.options.tool_choice
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in request.tools
        if asked in ("required", tool["function"]["name"])
    ]
    return {"json": forms[0] if len(forms) == 1 else {"anyOf": forms}}


def derender_body(model: str, request: Request, reader: AnswerReader) -> dict[str, Any]:
    """Return what asks the server to read an answer's ids with its own parsers."""
    length = len(request.ids)
    return {
        "model": model,
        "generate_response": {
            "request_id": "agentkv",
            "choices": [
                {"index": 0, "token_ids": list(reader.ids or ()), "finish_reason": reader.finish_reason}
            ],
        },
        "prompt_token_ids": request.ids.tolist(max(0, length - _TAIL), length),
        "chat_request": chat_request(model, request),
    }


def derendered(answer: Any) -> Mapping[str, Any]:
    """Return the message in a ``derender`` answer; empty if there is none."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    message = choices[0].get("message") if choices else None
    return message if isinstance(message, Mapping) else {}


def calls_of(message: Mapping[str, Any], raw: str) -> tuple[RawToolCall, ...]:
    """Return a message's calls, their arguments byte for byte as the model wrote them where that is plain.

    Parameters
    ----------
    raw
        The answer's text. Parsers write arguments anew; where the same values are found in it, the model's
        own text is kept.
    """
    written = parse_calls(raw)
    made = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if (
            index < len(written)
            and written[index].name == name
            and _same(written[index].arguments, arguments)
        ):
            arguments = written[index].arguments
        made.append(RawToolCall(call.get("id") or "", name, arguments))
    return tuple(made)


def _same(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
