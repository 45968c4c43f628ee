"""The messages of a request: the conversation as it stands, with errata in the messages that carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

from agentkv.encode import UPDATE_ID
from agentkv.entries import Carrier
from agentkv.profile import Wording
from agentkv.template import escaped
from agentkv.wording import neutral
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_agentkv.canonical import canonical, canonical_content, is_text_block
from langchain_agentkv.records import Said


def quoted(message: BaseMessage, wording: Wording, control_tokens: Iterable[str]) -> BaseMessage:
    """Return a message in canonical form, in which nothing reads as an erratum or ends the message.

    What the model and the developer said is left as it is.
    """
    plain = canonical(message)
    if isinstance(plain, AIMessage | SystemMessage):
        return plain
    controls = frozenset(control_tokens)

    def quote(text: str) -> str:
        return escaped(neutral(text, wording), controls)

    content = _mapped(canonical_content(plain.content), quote)
    return plain if content == plain.content else plain.model_copy(update={"content": content})


def system_message(own: SystemMessage | None, ours: str) -> SystemMessage | None:
    """Return the agent's own system message with our text behind it.

    Parameters
    ----------
    own
        Left as it is, marks for a provider's cache included.
    ours
        The text of the frozen prefix; may be empty.
    """
    if own is None:
        return SystemMessage(content=ours) if ours else None
    content = canonical_content(own.content)
    if not ours:
        return own.model_copy(update={"content": content})
    if isinstance(content, str):
        joined: str | list[Any] = f"{content}\n\n{ours}" if content else ours
    else:
        joined = [*content, {"type": "text", "text": ours}]
    return own.model_copy(update={"content": joined})


def with_said(messages: Sequence[BaseMessage], said: Sequence[Said]) -> list[BaseMessage]:
    """Return the messages of an epoch, with all that was said in it where it was said."""
    made: list[BaseMessage] = []
    by_message: dict[int, list[Said]] = {}
    for item in said:
        by_message.setdefault(item.at, []).append(item)
    for index, message in enumerate(messages):
        here = by_message.get(index, [])
        made.extend(_inserted(item) for item in here if item.entry.carrier in _IN_FRONT)
        before = [item.entry.text for item in here if item.entry.carrier is Carrier.FOLDED_BEFORE]
        behind = [item.entry.text for item in here if item.entry.carrier in _BEHIND]
        made.append(_folded(message, before, behind) if before or behind else message)
        made.extend(_inserted(item) for item in here if item.entry.carrier in _AFTER)
    return made


_IN_FRONT = frozenset({Carrier.SYSTEM_BEFORE, Carrier.USER_BEFORE})
_BEHIND = frozenset({Carrier.FOLDED_AFTER, Carrier.FOLDED_TOOL})
_AFTER = frozenset({Carrier.SYSTEM_AFTER, Carrier.TOOL})


def _inserted(item: Said) -> BaseMessage:
    text, carrier = item.entry.text, item.entry.carrier
    match carrier:
        case Carrier.SYSTEM_BEFORE | Carrier.SYSTEM_AFTER:
            return SystemMessage(content=text)
        case Carrier.USER_BEFORE:
            return HumanMessage(content=text)
        case Carrier.TOOL:
            return ToolMessage(content=text, tool_call_id=UPDATE_ID, name="update")
        case Carrier.FOLDED_BEFORE | Carrier.FOLDED_AFTER | Carrier.FOLDED_TOOL:
            raise ValueError(f"carrier {carrier.value!r} makes no message of its own")
        case _:
            assert_never(carrier)


def _folded(message: BaseMessage, before: Sequence[str], behind: Sequence[str]) -> BaseMessage:
    content = canonical_content(message.content)
    if isinstance(content, str):
        texts = [*before, *([content] if content else []), *behind]
        return message.model_copy(update={"content": "\n\n".join(texts)})
    front = [{"type": "text", "text": "\n\n".join(before)}] if before else []
    back = [{"type": "text", "text": "\n\n".join(behind)}] if behind else []
    return message.model_copy(update={"content": [*front, *content, *back]})


def _mapped(content: str | list[Any], function: Callable[[str], str]) -> str | list[Any]:
    if isinstance(content, str):
        return function(content)
    return [
        {**block, "text": function(block["text"])} if is_text_block(block) else block for block in content
    ]
