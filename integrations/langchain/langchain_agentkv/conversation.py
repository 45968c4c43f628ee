"""A LangChain conversation as the core reads it: inputs and ledger entries.

The core compares, plans and counts on these; what is sent are the messages themselves, see `rendering`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from agentkv.entries import (
    Carrier,
    Erratum,
    Generated,
    LedgerEntry,
    Message,
    SegmentAdded,
    ToolCallRecord,
)
from agentkv.inputs import Input, ToolResult, UserMessage
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from langchain_agentkv.canonical import text_of
from langchain_agentkv.records import Said

BEFORE: Final = frozenset({Carrier.SYSTEM_BEFORE, Carrier.USER_BEFORE, Carrier.FOLDED_BEFORE})
"""Carriers that stand in front of what a user said."""


@dataclass(frozen=True, slots=True)
class Group:
    """What stands between two answers."""

    start: int
    """Index of its first message."""
    end: int
    """Index behind its last message."""
    after: AIMessage | None
    """The answer before it; None at the beginning."""


def groups(messages: Sequence[BaseMessage]) -> list[Group]:
    """Return the groups of a conversation, empty ones between answers in a row included; never none."""
    answers = [index for index, message in enumerate(messages) if isinstance(message, AIMessage)]
    found = []
    for before, after in pairwise([-1, *answers, len(messages)]):
        last = messages[before] if before >= 0 else None
        found.append(Group(before + 1, after, last if isinstance(last, AIMessage) else None))
    return found


def inputs_of(messages: Sequence[BaseMessage], group: Group) -> list[Input]:
    """Return a group as inputs of a turn: results first, then everything else as what the user said."""
    results, others = _sorted(messages, group)
    made: list[Input] = [ToolResult(call_id, text) for call_id, text in results.items()]
    return [*made, *(UserMessage(text_of(message)) for message in others)]


def entries_of(
    messages: Sequence[BaseMessage], said: Iterable[Said], start: int = 0, end: int | None = None
) -> Iterator[LedgerEntry]:
    """Yield messages and what they carry as ledger entries.

    Parameters
    ----------
    messages
        The whole conversation, in canonical form and quoted.
    said
        What was said in it.
    start, end
        The part that is wanted; `end` is no longer than the last answer's index plus one.
    """
    known = list(said)
    stop = len(messages) if end is None else end
    for group in groups(messages):
        if group.end >= start and group.start <= stop:
            yield from _group_entries(messages, group, known, start, stop)


def answer_of(message: AIMessage, results: Iterable[str]) -> Generated:
    """Return an answer as an entry whose calls are those that were answered.

    Parameters
    ----------
    results
        Ids of the calls whose results follow.
    """
    calls = {
        call["id"]: (call["name"], json.dumps(call["args"])) for call in message.tool_calls if call["id"]
    }
    made = tuple(
        ToolCallRecord(
            id=call_id,
            name=calls.get(call_id, ("tool", "{}"))[0],
            arguments=calls.get(call_id, ("", "{}"))[1],
        )
        for call_id in results
    )
    return Generated(text=text_of(message), ids=None, tool_calls=made)


def place(carrier: Carrier, messages: Sequence[BaseMessage], group: Group) -> int:
    """Return the index of the message that carries an erratum told with a group.

    Parameters
    ----------
    group
        The newest; not empty.
    """
    if carrier not in BEFORE:
        return group.end - 1
    indexes = range(group.start, group.end)
    users = [i for i in indexes if isinstance(messages[i], HumanMessage)]
    users = users or [i for i in indexes if not isinstance(messages[i], ToolMessage)] or [group.end - 1]
    return users[-1] if carrier is Carrier.FOLDED_BEFORE else users[0]


def _group_entries(
    messages: Sequence[BaseMessage], group: Group, said: Sequence[Said], start: int, stop: int
) -> Iterator[LedgerEntry]:
    if group.after is not None and start <= group.start - 1 < stop:
        yield answer_of(group.after, _sorted(messages, group)[0])
    part = Group(max(group.start, start), min(group.end, stop), group.after)
    if part.start >= part.end:
        return
    results, others = _sorted(messages, part)
    here = [item.entry for item in said if part.start <= item.at < part.end]
    yield from _with_said(results, [text_of(message) for message in others], here)


def _with_said(
    results: dict[str, str], texts: Sequence[str], said: Sequence[Erratum | SegmentAdded]
) -> Iterator[LedgerEntry]:
    before = [entry for entry in said if entry.carrier in BEFORE and texts]
    for call_id, text in results.items():
        yield Message(role="tool", content=text, call_id=call_id, name="tool")
    for index, text in enumerate(texts):
        folded = [entry for entry in before if entry.carrier is Carrier.FOLDED_BEFORE]
        if index == 0:
            yield from (entry for entry in before if entry not in folded)
        if index == len(texts) - 1:
            yield from folded
        yield Message(role="user", content=text)
    yield from (entry for entry in said if entry not in before)


def _sorted(messages: Sequence[BaseMessage], group: Group) -> tuple[dict[str, str], list[BaseMessage]]:
    """Return a group's tool results by call id, and its other messages; a result of no call among them."""
    results: dict[str, str] = {}
    others: list[BaseMessage] = []
    for message in messages[group.start : group.end]:
        if isinstance(message, ToolMessage) and group.after is not None and message.tool_call_id:
            text = text_of(message)
            before = results.get(message.tool_call_id)
            results[message.tool_call_id] = text if before is None else f"{before}\n{text}"
        else:
            others.append(message)
    return results, others
