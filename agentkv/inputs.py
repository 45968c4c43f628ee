"""What a turn brings in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from agentkv.errors import InputError
from agentkv.ledger import LedgerState
from agentkv.values import is_unicode


@dataclass(frozen=True, slots=True)
class UserMessage:
    """What the user said."""

    content: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call returned."""

    call_id: str
    """`ToolCall.id` of the call that it answers."""
    content: str


Input: TypeAlias = UserMessage | ToolResult
"""One input of a turn."""


IN_WORDS: Final = "Answer in words this time; do not call a tool."
"""What is said behind the newest message where the caller lets the model call no tool."""


def in_words(inputs: Sequence[Input]) -> list[Input]:
    """Return inputs that ask for an answer without tool calls.

    Servers may leave the tools out of the prompt for ``tool_choice="none"``, which rewrites it.
    """
    if not inputs or not isinstance(inputs[-1].content, str):
        return list(inputs)
    *before, last = inputs
    return [*before, replace(last, content=f"{last.content}\n\n{IN_WORDS}")]


def check_inputs(inputs: Iterable[Input], state: LedgerState) -> Sequence[Input]:
    """Return a turn's inputs in the order they are told: results in the order of their calls, then the user.

    Raises
    ------
    InputError
        Nothing to say, a result of no open call or given twice, or a call of the round without a result.
    """
    given = list(inputs)
    for item in given:
        if not isinstance(item, UserMessage | ToolResult):
            raise InputError(f"{item!r} is not an input; give UserMessage(text) or ToolResult(call_id, text)")
        if not isinstance(item.content, str):
            raise InputError(f"{type(item).__name__}: content is {type(item.content).__name__}, not a str")
        if not is_unicode(item.content):
            raise InputError(
                f"{type(item).__name__}: content holds a lone surrogate, which cannot be sent as UTF-8; "
                'decode the bytes it came from with errors="replace"'
            )
    if not given:
        raise InputError("nothing to send: give a UserMessage or the ToolResult of each open call")
    results: dict[str, ToolResult] = {}
    open_ids = [call.id for call in state.open_calls]
    for item in given:
        if isinstance(item, ToolResult):
            if item.call_id in results:
                raise InputError(f"two results for call {item.call_id!r}")
            if item.call_id not in open_ids:
                known = ", ".join(open_ids) or "none"
                raise InputError(f"result of call {item.call_id!r}, which is not open; open calls: {known}")
            results[item.call_id] = item
    missing = [call.id for call in state.open_calls if call.id not in results]
    if missing:
        names = ", ".join(f"{call.id} ({call.name})" for call in state.open_calls if call.id in missing)
        raise InputError(
            f"calls without a result: {names}; send all results of a round together, "
            "a ToolResult that says why for a call that was not made"
        )
    users = [item for item in given if isinstance(item, UserMessage)]
    return [*(results[call_id] for call_id in open_ids), *users]
