"""One form for each message, and its digest.

A message comes back from a checkpoint or another middleware in several shapes: its content as None, "", [] or
a list of one text, its tool calls absent or empty. All shapes of a message have one canonical form, which is
what is sent, and one digest, which is what is recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

_POSITION: Final = "index"
"""What streaming adds to a block: its place among the blocks."""
_DIGITS: Final = 16


def canonical(message: BaseMessage) -> BaseMessage:
    """Return the message in its one form; itself if it has that form already."""
    changes: dict[str, Any] = {}
    content = canonical_content(message.content)
    if content != message.content:
        changes["content"] = content
    extra = message.additional_kwargs
    if isinstance(message, AIMessage) and "tool_calls" in extra and not extra["tool_calls"]:
        changes["additional_kwargs"] = {key: value for key, value in extra.items() if key != "tool_calls"}
    return message.model_copy(update=changes) if changes else message


def canonical_content(content: object) -> str | list[Any]:
    """Return a content as one string where it is text alone, else as a list of blocks.

    Parameters
    ----------
    content
        A str, a list of blocks, or None.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return str(content)
    blocks = list(_blocks(content))
    if not blocks:
        return ""
    if len(blocks) == 1 and _is_plain(blocks[0]):
        return str(blocks[0]["text"])
    return blocks


def digest(message: BaseMessage) -> str:
    """Return 16 hexadecimal digits that are one for all shapes of a message.

    Ids, response metadata and usage do not count: none of them is sent.
    """
    told: dict[str, Any] = {
        "role": _role(message),
        "content": canonical_content(message.content),
        "name": message.name or "",
    }
    if isinstance(message, AIMessage):
        told["calls"] = [[call["id"], call["name"], call["args"]] for call in message.tool_calls]
        told["invalid"] = [[call["id"], call["name"], call["args"]] for call in message.invalid_tool_calls]
        told["reasoning"] = message.additional_kwargs.get("reasoning_content") or ""
    if isinstance(message, ToolMessage):
        told["answers"] = message.tool_call_id
        told["failed"] = message.status == "error"
    return digest_of(told)


def digest_of(value: object) -> str:
    """Return 16 hexadecimal digits of a value's JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def chains(messages: Iterable[BaseMessage]) -> list[str]:
    """Return the digest of the first n messages for each n from 0; one message more costs one digest."""
    found = [""]
    for message in messages:
        both = f"{found[-1]} {digest(message)}"
        found.append(hashlib.sha256(both.encode()).hexdigest()[:_DIGITS])
    return found


def text_of(message: BaseMessage) -> str:
    """Return what a message says, with a name in brackets for what is not text."""
    content = canonical_content(message.content)
    if isinstance(content, str):
        return content
    return "\n".join(
        str(block["text"]) if _is_text(block) else f"[{block.get('type', 'block')} {digest_of(block)}]"
        for block in content
    )


def is_text_block(block: object) -> bool:
    """Whether a block of a content is text."""
    return isinstance(block, Mapping) and _is_text(block)


def _blocks(content: list[Any]) -> Iterator[dict[str, Any]]:
    for block in content:
        if isinstance(block, str):
            if block:
                yield {"type": "text", "text": block}
        elif _is_plain(block):
            if block["text"]:
                yield {"type": "text", "text": block["text"]}
        else:
            yield block


def _is_text(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and isinstance(block.get("text"), str)


def _is_plain(block: object) -> bool:
    """Whether a block is text and nothing else, such as a cache mark or citations."""
    if not isinstance(block, Mapping) or not _is_text(block):
        return False
    return not any(value for key, value in block.items() if key not in ("type", "text", _POSITION))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return f"chat:{message.role}"
    return str(message.type).removesuffix("MessageChunk").lower()
