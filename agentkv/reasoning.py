"""Reasoning told apart from the answer, where the server does not do it.

Many models write what they think between two tags in front of their answer. Servers with a reasoning parser
return it apart; this is the local fallback for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from agentkv.errors import ConfigurationError

OPEN_TAG: Final = "<think>"
CLOSE_TAG: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """What a piece of an answer adds to its text and to its reasoning."""

    text: str = ""
    reasoning: str = ""


class _Place(Enum):
    """How far the answer is; it only ever goes on."""

    START = auto()
    OPENED = auto()
    """Behind the open tag, nothing but white space yet."""
    INSIDE = auto()
    CLOSED = auto()
    """Behind the close tag, nothing but white space yet."""
    TEXT = auto()


class ReasoningSplitter:
    """Splits a streamed answer into text and reasoning.

    This is the local fallback for servers that do not parse reasoning themselves. Only a block at the
    answer's beginning counts; a tag further on is plain text. The tags are in neither part, nor is the white
    space directly around them. An answer that ends inside the block is all reasoning.

    Parameters
    ----------
    open_tag, close_tag
        What the block stands between.
    inside
        Whether the prompt has opened the block already (`opens_reasoning`). An open tag that the model
        repeats then is dropped as well.

    Raises
    ------
    ConfigurationError
        A tag is empty or has white space around it, or both are the same.
    """

    def __init__(self, open_tag: str = OPEN_TAG, close_tag: str = CLOSE_TAG, *, inside: bool) -> None:
        _check(open_tag, close_tag)
        self._open = open_tag
        self._close = close_tag
        self._place = _Place.START
        self._unless_opened = _Place.OPENED if inside else _Place.TEXT
        self._held = ""

    def push(self, text: str) -> Piece:
        """Take the next piece of the answer and return what is certain by now.

        Held back is only what may be the beginning of a tag, with the white space in front of it.
        """
        self._held += text
        if self._place is _Place.START:
            self._start()
        if self._place is _Place.OPENED:
            self._skip(_Place.INSIDE)
        reasoning = self._think() if self._place is _Place.INSIDE else ""
        if self._place is _Place.CLOSED:
            self._skip(_Place.TEXT)
        return Piece(self._take(len(self._held)) if self._place is _Place.TEXT else "", reasoning)

    def flush(self) -> Piece:
        """Return what was held back, at the end of the answer."""
        rest = self._take(len(self._held))
        if self._place is _Place.INSIDE:
            return Piece(reasoning=rest)
        if self._place is not _Place.START:
            return Piece()
        if self._unless_opened is _Place.TEXT:
            return Piece(text=rest)
        return Piece(reasoning=rest.lstrip())

    def _start(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(self._open):
            self._held = bare[len(self._open) :]
            self._place = _Place.OPENED
        elif not self._open.startswith(bare):
            self._place = self._unless_opened

    def _skip(self, then: _Place) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._place = then

    def _think(self) -> str:
        at = self._held.find(self._close)
        if at < 0:
            return self._take(_certain(self._held, self._close))
        reasoning = self._take(at).rstrip()
        self._take(len(self._close))
        self._place = _Place.CLOSED
        return reasoning

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def split(text: str, open_tag: str = OPEN_TAG, close_tag: str = CLOSE_TAG, *, inside: bool = False) -> Piece:
    """Split a whole answer, with the same result as pushing it in any pieces.

    This is the local fallback for servers that do not parse reasoning themselves.

    Parameters
    ----------
    text
        The answer.
    open_tag, close_tag, inside
        As for `ReasoningSplitter`.

    Raises
    ------
    ConfigurationError
        A tag is empty or has white space around it, or both are the same.
    """
    splitter = ReasoningSplitter(open_tag, close_tag, inside=inside)
    first, last = splitter.push(text), splitter.flush()
    return Piece(first.text + last.text, first.reasoning + last.reasoning)


def opens_reasoning(prompt_tail: str, open_tag: str = OPEN_TAG, close_tag: str = CLOSE_TAG) -> bool:
    """Tell whether a prompt leaves a block of reasoning open, so that the answer begins inside it.

    Parameters
    ----------
    prompt_tail
        The end of the rendered prompt, at least the opening of the answer.
    open_tag, close_tag
        As for `ReasoningSplitter`.

    Raises
    ------
    ConfigurationError
        A tag is empty or has white space around it, or both are the same.
    """
    _check(open_tag, close_tag)
    opened, closed = prompt_tail.rfind(open_tag), prompt_tail.rfind(close_tag)
    # One tag may be a part of the other.
    behind = opened >= 0 and (closed < 0 or opened >= closed + len(close_tag))
    return behind and not prompt_tail[opened + len(open_tag) :].strip()


def _check(open_tag: str, close_tag: str) -> None:
    for name, tag in (("open_tag", open_tag), ("close_tag", close_tag)):
        if not tag or tag != tag.strip():
            raise ConfigurationError(f"{name}={tag!r}: give a tag without white space around it")
    if open_tag == close_tag:
        raise ConfigurationError(f"open_tag and close_tag are both {open_tag!r}: give two different tags")


def _certain(text: str, tag: str) -> int:
    """Count the characters in front of what may begin `tag`, and of the white space before that."""
    longest = min(len(text), len(tag) - 1)
    begun = next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - begun].rstrip())
