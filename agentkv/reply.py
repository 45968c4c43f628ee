"""What a model call gives back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentkv.backends.base import FinishReason
from agentkv.entries import Generated
from agentkv.inputs import ToolResult
from agentkv.report import TurnReport


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made: the tool is declared and the arguments are a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str
    """The argument text as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    """Calls to make; send a `ToolResult` for each before anything else."""
    refused: tuple[ToolResult, ...]
    """Results for calls that cannot be made (no such tool any more, malformed arguments); sent with the
    next inputs without further doing."""
    report: TurnReport
    finish_reason: FinishReason
    reasoning: str = ""
    stopped: bool = False
    """Whether the caller stopped the stream and kept what had come."""

    def __str__(self) -> str:
        return self.text


def make_reply(answer: Generated, report: TurnReport, finish_reason: FinishReason) -> Reply:
    """Return what the caller gets for a recorded answer."""
    calls = tuple(
        ToolCall(call.id, call.name, json.loads(call.arguments), call.arguments)
        for call in answer.tool_calls
        if call.available and call.valid
    )
    return Reply(
        text=answer.text,
        tool_calls=calls,
        refused=refusals(answer),
        report=report,
        finish_reason=finish_reason,
        reasoning=answer.reasoning,
        stopped=answer.stopped,
    )


def refusals(answer: Generated) -> tuple[ToolResult, ...]:
    """Return the results that stand for an answer's calls that cannot be made."""
    made = []
    for call in answer.tool_calls:
        if not call.available:
            made.append(ToolResult(call.id, f"The tool {call.name!r} is not available. It was not called."))
        elif not call.valid:
            made.append(ToolResult(call.id, "The arguments are not a JSON object. The tool was not called."))
    return tuple(made)
