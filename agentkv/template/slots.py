"""Data taken out of messages, marks left in its place.

A chat template is rendered over marks only, so what it writes depends on a conversation's shape and never on
its data; the data is put back by position. Nothing a message holds can pose as a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeAlias

from agentkv.errors import TemplateError
from agentkv.tokenizer import WireMessage

_PREFIX: Final = "zQvXk7"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
# Nine letters and digits: some templates refuse call ids of any other form.
MARK: Final = re.compile(_PREFIX + "([0-9a-z]{3})")
MOST_SLOTS: Final = len(_DIGITS) ** 3

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Json: TypeAlias = Any
"""A JSON value."""


class SlotKind(Enum):
    """What a slot holds."""

    CONTENT = auto()
    """A message's text, which the template must show."""
    CALL_NAME = auto()
    """The name of a called function, which the template must show."""
    WORD = auto()
    """An id or name; templates may check its form."""
    TEXT = auto()
    """Any other string: reasoning, an argument, a tool's description."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of data and where it comes from."""

    kind: SlotKind
    owner: str
    """For messages to people, such as ``"message 2 (user)"``."""
    value: str


def mark(index: int) -> str:
    """Return the mark of slot `index`."""
    if not 0 <= index < MOST_SLOTS:
        raise TemplateError(f"{index} strings in one turn's messages: send fewer than {MOST_SLOTS}")
    high, low = divmod(index, 36)
    return _PREFIX + _DIGITS[high // 36] + _DIGITS[high % 36] + _DIGITS[low]


def index_of(digits: str) -> int:
    """Return the slot index of a mark's three digits."""
    return int(digits, 36)


def filled(value: Json, fill: Callable[[int], str | None]) -> Json:
    """Copy a JSON value, exchanging each mark for what `fill` says; None keeps it."""
    if isinstance(value, str):
        found = MARK.fullmatch(value)
        new = fill(index_of(found[1])) if found else None
        return value if new is None else new
    if isinstance(value, Mapping):
        return {key: filled(item, fill) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, fill) for item in value]
    return value


class Slotting:
    """Replaces the data of messages and tools with marks, numbered in order.

    Parameters
    ----------
    holds_control
        Whether a text would make a control id.
    """

    def __init__(self, holds_control: Callable[[str], bool]) -> None:
        self.slots: list[Slot] = []
        self._holds_control = holds_control

    def messages(self, messages: Sequence[WireMessage]) -> list[dict[str, Json]]:
        """Copy messages with marks for their strings; roles and keys stay."""
        return [self._message(number, message) for number, message in enumerate(messages)]

    def tools(self, tools: Sequence[Mapping[str, Json]]) -> list[Json]:
        """Copy tools with marks for those strings that would make a control id."""
        return [self._tool(tool) for tool in tools]

    def _message(self, number: int, message: WireMessage) -> dict[str, Json]:
        role = message.get("role")
        if not isinstance(role, str) or not _NAME.fullmatch(role):
            raise TemplateError(f"message {number} has the role {role!r}: give a plain word such as 'user'")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise TemplateError(
                f"the content of message {number} ({role}) is a {type(content).__name__}: give one string"
            )
        owner = f"message {number} ({role})"
        return {
            key: value if key == "role" else self._walk(value, owner, (self._key(key, owner),))
            for key, value in message.items()
        }

    def _walk(self, value: Json, owner: str, path: tuple[str, ...]) -> Json:
        if isinstance(value, str):
            if not value or (path[0] == "tool_calls" and path[-1] == "type"):
                return value
            if path[-2:] == ("function", "arguments") and (call := _object(value)) is not None:
                # Templates are written for mappings, as servers hand them over.
                return self._walk(call, owner, path)
            return self._slot(_kind(path), owner, value)
        if isinstance(value, Mapping):
            return {
                key: self._walk(item, owner, (*path, self._key(key, owner))) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._walk(item, owner, path) for item in value]
        return value

    def _tool(self, value: Json) -> Json:
        if isinstance(value, str):
            risky = _PREFIX in value or self._holds_control(value)
            return self._slot(SlotKind.TEXT, "a tool", value) if risky else value
        if isinstance(value, Mapping):
            return {self._key(key, "a tool"): self._tool(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._tool(item) for item in value]
        return value

    def _slot(self, kind: SlotKind, owner: str, value: str) -> str:
        self.slots.append(Slot(kind, owner, value))
        return mark(len(self.slots) - 1)

    def _key(self, key: str, owner: str) -> str:
        if not _NAME.fullmatch(key) and (_PREFIX in key or self._holds_control(key)):
            raise TemplateError(f"{owner} has a key {key!r} that holds a control token: rename it")
        if _PREFIX in key:
            raise TemplateError(
                f"{owner} has a key {key!r} that holds {_PREFIX!r}, which is kept free: rename it"
            )
        return key


def _kind(path: tuple[str, ...]) -> SlotKind:
    if path == ("content",):
        return SlotKind.CONTENT
    if path == ("tool_calls", "function", "name"):
        return SlotKind.CALL_NAME
    if path in {("name",), ("tool_call_id",), ("tool_calls", "id")}:
        return SlotKind.WORD
    return SlotKind.TEXT


def _object(text: str) -> dict[str, Json] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
