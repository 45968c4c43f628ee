"""A completion as the ledger records it, its tool calls included."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from agentkv.backends.base import Completion
from agentkv.entries import Generated, ToolCallRecord
from agentkv.tools import ParsedCall, loads, parse_calls, stable_arguments


def recorded_answer(
    completion: Completion,
    *,
    turn: int,
    tools: Collection[str] | None,
    stopped: bool,
    salt_check: str = "",
) -> Generated:
    """Return what the model said, with the calls that it made.

    Parameters
    ----------
    turn
        Number of the turn, from which the ids of calls are made that the server gave none.
    tools
        Names of the declared tools; None if none was ever told or may be called, so that no call is looked
        for.
    stopped
        Whether the caller stopped the stream: a call that is half written is none.
    """
    calls = () if tools is None or stopped else tuple(_calls(completion, turn, tools))
    return Generated(
        text=completion.text,
        ids=completion.ids,
        tool_calls=calls,
        reasoning=completion.reasoning,
        stopped=stopped,
        prompt_tokens=completion.usage.prompt_tokens,
        salt_check=salt_check,
    )


def _calls(completion: Completion, turn: int, tools: Collection[str]) -> Iterator[ToolCallRecord]:
    if completion.tool_calls is not None:
        for call in completion.tool_calls:
            valid = isinstance(loads(call.arguments), dict)
            yield ToolCallRecord(
                id=call.id,
                name=call.name,
                arguments=stable_arguments(ParsedCall(call.name, call.arguments, valid)),
                valid=valid,
                available=call.name in tools,
            )
        return
    for index, parsed in enumerate(parse_calls(completion.text), start=1):
        yield ToolCallRecord(
            # Nine letters and digits: some templates refuse ids of any other form.
            id=f"call{turn:03x}{index:02x}",
            name=parsed.name,
            arguments=stable_arguments(parsed),
            valid=parsed.valid,
            available=parsed.name in tools,
        )
