"""Ledger entries as chat messages, and as token ids that only ever grow.

Both encoders read the same entries. `extend_ids` is the hot path: it costs the new messages only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, assert_never

from agentkv.entries import Carrier, Erratum, Frozen, Generated, LedgerEntry, Message, SegmentAdded
from agentkv.errors import LedgerError
from agentkv.template import Acceptance, TemplateEncoder, escaped, escaped_schema
from agentkv.tokenizer import WireMessage
from agentkv.tokens import TokenIds
from agentkv.tools import without_calls

UPDATE_ID: Final = "update000"
"""Call id of errata in the tool role; nine letters and digits, as some templates refuse any other form."""


class Encoding(StrEnum):
    """How a prompt is made from the ledger."""

    TOKENS = "tokens"
    """New messages are turned into ids and appended; nothing sent is rendered again."""
    MESSAGES = "messages"
    """The whole conversation is rendered each turn, as a chat endpoint does."""


def choose_encoding(encoder: TemplateEncoder) -> Encoding:
    """Return `Encoding.MESSAGES` where the template moves blocks behind what was sent, else `TOKENS`."""
    traits = encoder.traits
    if traits.tools_moved or traits.leading_system is Acceptance.MOVED:
        return Encoding.MESSAGES
    return Encoding.TOKENS


def encode_ids(entries: Iterable[LedgerEntry], encoder: TemplateEncoder) -> TokenIds:
    """Encode an epoch from its beginning; ends with the generation prompt unless the last entry is an answer.

    Raises
    ------
    LedgerError
        The entries do not begin with `Frozen`.
    """
    frozen, groups = _split(entries)
    ids: TokenIds | None = None
    last: Sequence[int] = ()
    for group, answer in groups:
        if ids is None:
            opening = [*_opening(frozen), *wire(_with_summary(frozen, group), encoder)]
            ids = TokenIds(encoder.opening(opening, tools=frozen.tools))
        elif group:
            ids = ids.extend(encoder.extension(last, wire(group, encoder)))
        if answer is not None:
            last = answer_ids(answer, encoder)
            ids = ids.extend(last)
    if ids is None:
        raise LedgerError("an epoch without messages has no ids")
    return ids


def extend_ids(
    ids: TokenIds, last: Generated, group: Sequence[LedgerEntry], encoder: TemplateEncoder
) -> TokenIds:
    """Append a turn's entries to ids that end with the answer `last`."""
    return ids.extend(encoder.extension(answer_ids(last, encoder), wire(group, encoder)))


def answer_ids(answer: Generated, encoder: TemplateEncoder) -> Sequence[int]:
    """Return an answer's ids: as generated, or its text encoded where they are unknown."""
    return answer.ids if answer.ids is not None else encoder.assistant(answer.text)


def render_ids(entries: Iterable[LedgerEntry], encoder: TemplateEncoder) -> TokenIds:
    """Encode an epoch as a chat endpoint would: all messages through the template, then tokenised."""
    frozen, _ = _split(entries := list(entries))
    tools = [escaped_schema(tool, encoder.tokenizer.control_tokens) for tool in frozen.tools]
    return TokenIds(encoder.render_all(encode_messages(entries, encoder), tools=tools))


def render_told(entries: Iterable[LedgerEntry], encoder: TemplateEncoder) -> TokenIds:
    """Encode an epoch that ends with an answer: its last prompt as it was rendered, then the answer."""
    *told, last = entries
    if not isinstance(last, Generated):
        raise LedgerError("the last entry is not an answer")
    return render_ids(told, encoder).extend(answer_ids(last, encoder))


def encode_messages(entries: Iterable[LedgerEntry], encoder: TemplateEncoder) -> list[WireMessage]:
    """Return an epoch as chat messages in OpenAI's form.

    What reads as a control token in a message that is not the model's own is escaped.
    """
    frozen, groups = _split(entries)
    messages = _opening(frozen)
    for index, (group, answer) in enumerate(groups):
        messages.extend(wire(_with_summary(frozen, group) if index == 0 else group, encoder))
        if answer is not None:
            messages.append(_assistant(answer, tools=encoder.traits.tools))
    controls = encoder.tokenizer.control_tokens
    return [
        m if m["role"] == "assistant" else {**m, "content": escaped(m["content"], controls)}
        for m in encoder.folded(messages)
    ]


def _split(
    entries: Iterable[LedgerEntry],
) -> tuple[Frozen, Iterator[tuple[list[LedgerEntry], Generated | None]]]:
    stream = iter(entries)
    frozen = next(stream, None)
    if not isinstance(frozen, Frozen):
        raise LedgerError("an epoch begins with a Frozen entry")
    return frozen, _groups(stream)


def _groups(entries: Iterator[LedgerEntry]) -> Iterator[tuple[list[LedgerEntry], Generated | None]]:
    group: list[LedgerEntry] = []
    for entry in entries:
        if isinstance(entry, Generated):
            yield group, entry
            group = []
        else:
            group.append(entry)
    if group:
        yield group, None


def _opening(frozen: Frozen) -> list[WireMessage]:
    return [{"role": "system", "content": frozen.system}] if frozen.system else []


def _with_summary(frozen: Frozen, group: list[LedgerEntry]) -> list[LedgerEntry]:
    if frozen.summary is None:
        return group
    text = f"Summary of the conversation so far:\n{frozen.summary}"
    # In front of all else: an erratum that corrects it has to stand behind it.
    return [SegmentAdded(segments={}, text=text, carrier=Carrier.FOLDED_BEFORE), *group]


def _assistant(answer: Generated, *, tools: bool) -> WireMessage:
    # Calls that were found in the text are written by the template, if it knows tools; else they stay text.
    calls = answer.tool_calls if tools else ()
    content = without_calls(answer.text) if calls else answer.text
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": json.loads(c.arguments)},
            }
            for c in answer.tool_calls
        ]
    return message


def wire(group: Iterable[LedgerEntry], encoder: TemplateEncoder) -> list[WireMessage]:
    """Return what stands between two answers as chat messages, folded where the carrier says so."""
    messages: list[dict[str, Any]] = []
    held: list[str] = []
    as_user = encoder.traits.tool_role is not Acceptance.ACCEPTED
    merges = as_user or encoder.traits.alternation
    for entry in group:
        match entry:
            case Message(role="tool") if as_user:
                _join(messages, f"Result of call {entry.call_id}:\n{entry.content}")
            case Message():
                content = "\n\n".join([*held, entry.content])
                held = []
                message: dict[str, Any] = {"role": entry.role, "content": content}
                if entry.call_id is not None:
                    message["tool_call_id"] = entry.call_id
                    message["name"] = entry.name
                if merges and entry.role == "user" and messages and messages[-1]["role"] == "user":
                    _join(messages, content)
                else:
                    messages.append(message)
            case Erratum() | SegmentAdded():
                _carry(entry.text, entry.carrier, messages, held)
            case Frozen() | Generated():
                raise LedgerError(f"a {entry.kind} entry stands between two answers")
            case _:
                assert_never(entry)
    if held:
        raise LedgerError("an erratum is folded into a user message that is missing")
    return list(messages)


def _join(messages: list[dict[str, Any]], content: str) -> None:
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += "\n\n" + content
    else:
        messages.append({"role": "user", "content": content})


def _carry(text: str, carrier: Carrier, messages: list[dict[str, Any]], held: list[str]) -> None:
    match carrier:
        case Carrier.SYSTEM_BEFORE | Carrier.SYSTEM_AFTER:
            messages.append({"role": "system", "content": text})
        case Carrier.USER_BEFORE:
            messages.append({"role": "user", "content": text})
        case Carrier.TOOL:
            messages.append({"role": "tool", "content": text, "tool_call_id": UPDATE_ID, "name": "update"})
        case Carrier.FOLDED_BEFORE:
            held.append(text)
        case Carrier.FOLDED_AFTER | Carrier.FOLDED_TOOL:
            if not messages:
                raise LedgerError("an erratum is folded into a message that is missing")
            messages[-1]["content"] += "\n\n" + text
        case _:
            assert_never(carrier)
