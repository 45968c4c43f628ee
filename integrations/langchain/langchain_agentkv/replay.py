"""A vLLM answer as a LangChain message that keeps what the model wrote, and back to the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentkv.tools import ParsedCall, loads, stable_arguments
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall

from langchain_agentkv.canonical import canonical_content, is_text_block

CALLS: Final = "agentkv_calls"
"""Where a message keeps its calls as the model wrote them, by their place among the calls."""
REASONING: Final = "reasoning_content"
"""Where LangChain's messages keep what the model thought."""


def raw_calls(calls: Sequence[Mapping[str, Any]] | None) -> dict[str, dict[str, str]]:
    """Return the calls of an answer, or a piece of them, in a form that adds up over a stream."""
    found = {}
    for place, call in enumerate(calls or ()):
        function = call.get("function") or {}
        parts = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        index = call.get("index")
        found[str(place if index is None else index)] = {key: text for key, text in parts.items() if text}
    return found


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return what a server's message or delta holds of the model's thoughts."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def is_object(arguments: str | None) -> bool:
    """Whether a call's arguments are a JSON object."""
    return isinstance(loads(arguments or ""), dict)


def without_odd_calls(
    calls: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[InvalidToolCall]]:
    """Split calls into those whose arguments are a JSON object and those that are invalid.

    Parameters
    ----------
    calls
        Of a server's message.
    """
    good, bad = [], []
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not arguments or is_object(arguments):
            good.append(call)
            continue
        bad.append(_invalid(function.get("name"), arguments, call.get("id")))
    return good, bad


def wire_message(message: BaseMessage, wire: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as it is sent to vLLM: one form of its content, calls and thoughts as written.

    Parameters
    ----------
    wire
        What LangChain makes of the message.
    """
    made = {**wire, "content": _content(wire.get("content"))}
    if not isinstance(message, AIMessage):
        return made
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
    else:
        made["tool_calls"] = [_as_written(call, message) for call in made["tool_calls"]]
    thought = message.additional_kwargs.get(REASONING)
    if thought:
        made["reasoning"] = thought
    return made


def demoted(message: AIMessage) -> AIMessage:
    """Return an answer in which calls are invalid whose written arguments are no JSON object.

    LangChain reads the arguments of a streamed call leniently, as far as they go.
    """
    written = [raw for raw in (message.additional_kwargs.get(CALLS) or {}).values() if raw.get("id")]
    odd = {raw["id"]: raw.get("arguments", "") for raw in written if not is_object(raw.get("arguments", ""))}
    bad = [call for call in message.tool_calls if call["id"] in odd and odd[call["id"]]]
    if not bad:
        return message
    invalid = [_invalid(call["name"], odd[call["id"] or ""], call["id"]) for call in bad]
    good = [call for call in message.tool_calls if call not in bad]
    return message.model_copy(
        update={"tool_calls": good, "invalid_tool_calls": [*message.invalid_tool_calls, *invalid]}
    )


def _invalid(name: str | None, arguments: str | None, call_id: str | None) -> InvalidToolCall:
    return InvalidToolCall(
        name=name,
        args=arguments,
        id=call_id,
        error="the arguments are no JSON object",
        type="invalid_tool_call",
    )


def _content(content: object) -> str | list[Any]:
    one = canonical_content(content)
    if isinstance(one, str) or not all(is_text_block(block) and len(block) == 2 for block in one):
        return one
    # vLLM joins texts so where a template takes no lists; done here, all templates read the same.
    return "\n".join(block["text"] for block in one)


def _as_written(call: Mapping[str, Any], message: AIMessage) -> dict[str, Any]:
    function = dict(call["function"])
    text = function["arguments"] if isinstance(function.get("arguments"), str) else ""
    for raw in (message.additional_kwargs.get(CALLS) or {}).values():
        written = raw.get("arguments", "")
        same = raw.get("id") == call.get("id") and loads(written) == loads(text)
        if same and is_object(written):
            return {**call, "function": {**function, "arguments": written}}
    # Servers read arguments as JSON: malformed ones are replaced, always by the same text.
    parsed = ParsedCall(function.get("name") or "", text, is_object(text))
    return {**call, "function": {**function, "arguments": stable_arguments(parsed)}}
