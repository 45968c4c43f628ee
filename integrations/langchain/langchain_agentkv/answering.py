"""A backend's completion as a LangChain answer, whole or in pieces that add up to the same."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agentkv.answer import recorded_answer
from agentkv.backends.base import Completion, Delta
from agentkv.entries import ToolCallRecord
from agentkv.tools import without_calls
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, UsageMetadata
from langchain_core.messages.ai import InputTokenDetails
from langchain_core.messages.tool import ToolCall, tool_call_chunk

from langchain_agentkv.canonical import digest
from langchain_agentkv.replay import REASONING
from langchain_agentkv.stamps import CALL_KEY, STAMP_KEY, Stamp, dumped_cost, restamped

_OPEN: Final = "<tool_call>"
_ODD: Final = "odd"


@dataclass(frozen=True, slots=True)
class Reading:
    """What is needed to read an answer."""

    turn: int
    """Number of the call, of which the ids of calls are made."""
    tools: Collection[str] | None
    """Names of the tools that may be called; None if no call is looked for."""
    stamp: Stamp
    """Without the answer's ids and digest."""
    name: str
    """Of the model."""


def message_of(completion: Completion, reading: Reading) -> AIMessage:
    """Return an answer as a message; calls whose arguments are no JSON object are invalid calls."""
    calls = _calls(completion, reading)
    message = AIMessage(
        content=_visible(completion.text) if calls else completion.text,
        tool_calls=[_call(call) for call in calls if call.valid],
        invalid_tool_calls=[_invalid(call.name, call.arguments, call.id) for call in calls if not call.valid],
        additional_kwargs={REASONING: completion.reasoning} if completion.reasoning else {},
        usage_metadata=_usage(completion),
    )
    message.response_metadata = {
        "model_name": reading.name,
        "finish_reason": "tool_calls" if calls else completion.finish_reason.value,
        CALL_KEY: dumped_cost(completion),
    }
    if completion.ids is not None:
        stamp = replace(reading.stamp, ids=completion.ids, digest=digest(message)).dumped()
        odd = [call.id for call in calls if not call.valid]
        message.response_metadata[STAMP_KEY] = {**stamp, **({_ODD: odd} if odd else {})}
    return message


def repaired(message: AIMessage) -> AIMessage:
    """Return an answer whose invalid calls are invalid: LangChain reads a streamed call leniently."""
    kept = message.response_metadata.get(STAMP_KEY)
    odd = kept.get(_ODD, ()) if isinstance(kept, Mapping) else ()
    bad = [call for call in message.tool_calls if call["id"] in odd]
    if not bad:
        return message
    good = [call for call in message.tool_calls if call not in bad]
    made = [_invalid(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"]) for call in bad]
    return message.model_copy(update={"tool_calls": good, "invalid_tool_calls": made})


class Pieces:
    """Turns a stream's deltas into chunks; what may be a call is held back until the answer is whole."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._text = ""
        self._shown = 0
        self._thought = ""

    def push(self, delta: Delta) -> AIMessageChunk | None:
        """Return what can be shown of a delta; None if that is nothing."""
        self._text += delta.text
        self._thought += delta.reasoning
        until = len(self._text) if self._reading.tools is None else _safe(self._text)
        new = self._text[self._shown : until]
        self._shown = max(self._shown, until)
        if not new and not delta.reasoning:
            return None
        more = {REASONING: delta.reasoning} if delta.reasoning else {}
        return AIMessageChunk(content=new, additional_kwargs=more)

    def last(self, completion: Completion) -> AIMessageChunk:
        """Return the last chunk: what was held back, the calls, and what the call cost."""
        message = self._as_shown(message_of(completion, self._reading))
        text, thought = str(message.content), _thought(message)
        rest = thought[len(self._thought) :]
        calls = [
            tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index)
            for index, call in enumerate(message.tool_calls)
        ]
        calls += [
            tool_call_chunk(name=call["name"], args=call["args"], id=call["id"], index=len(calls) + index)
            for index, call in enumerate(message.invalid_tool_calls)
        ]
        return AIMessageChunk(
            content=text[self._shown :],
            additional_kwargs={REASONING: rest} if rest else {},
            response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
            tool_call_chunks=calls,
            chunk_position="last",
        )

    def _as_shown(self, message: AIMessage) -> AIMessage:
        """Return a message that begins with what was shown, where the server reads it otherwise."""
        text, thought, shown = str(message.content), _thought(message), self._text[: self._shown]
        if text.startswith(shown) and thought.startswith(self._thought):
            return message
        kwargs = {REASONING: self._thought} if self._thought else {}
        return restamped(message, message.model_copy(update={"content": shown, "additional_kwargs": kwargs}))


def _safe(text: str) -> int:
    """Return how much of an answer is surely no part of a call, and no white space in front of one."""
    if text.lstrip()[:1] == "{":
        return 0
    found = text.find(_OPEN)
    until = len(text) if found < 0 else found
    if found < 0:
        until -= next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)
    return len(text[:until].rstrip())


def _visible(text: str) -> str:
    """Return an answer's text without its calls; what stands in front of them is left as it is."""
    rest = without_calls(text)
    return text[: len(text) - len(text.lstrip())] + rest if rest else ""


def _calls(completion: Completion, reading: Reading) -> tuple[ToolCallRecord, ...]:
    return recorded_answer(completion, turn=reading.turn, tools=reading.tools, stopped=False).tool_calls


def _call(call: ToolCallRecord) -> ToolCall:
    return ToolCall(name=call.name, args=json.loads(call.arguments), id=call.id, type="tool_call")


def _invalid(name: str, arguments: str, call_id: str | None) -> InvalidToolCall:
    return InvalidToolCall(
        name=name,
        args=arguments,
        id=call_id,
        error="the arguments are no JSON object",
        type="invalid_tool_call",
    )


def _usage(completion: Completion) -> UsageMetadata:
    usage = completion.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.generated_tokens,
        total_tokens=usage.prompt_tokens + usage.generated_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def _thought(message: AIMessage) -> str:
    return str(message.additional_kwargs.get(REASONING) or "")
