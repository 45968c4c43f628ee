"""What a template writes around the data of messages of one shape, and what it does to that data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from agentkv.errors import TemplateError
from agentkv.template.pieces import Piece, PieceTokenizer
from agentkv.template.slots import MARK, Slot, SlotKind, index_of, mark

_PROBE: Final = '"\n\\<é'
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')

Render: TypeAlias = Callable[[Callable[[int], str | None]], str]
"""Renders the shape, each mark exchanged for what the given function says."""


class StrayTextError(TemplateError):
    """What the template writes for new messages depends on text of earlier ones."""


class Escape(Enum):
    """How a template writes a string."""

    NONE = auto()
    JSON = auto()
    JSON_ASCII = auto()
    JSON_HTML = auto()
    """As Jinja's own ``tojson`` does: safe within HTML."""
    UNKNOWN = auto()
    """Only text that every form leaves alone can be sent."""


def _json_html(text: str) -> str:
    out = json.dumps(text)[1:-1]
    for char in "<>&'":
        out = out.replace(char, f"\\u{ord(char):04x}")
    return out


_ESCAPES: Final[Mapping[Escape, Callable[[str], str]]] = {
    Escape.NONE: lambda text: text,
    Escape.JSON: lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    Escape.JSON_ASCII: lambda text: json.dumps(text)[1:-1],
    Escape.JSON_HTML: _json_html,
}


@dataclass(frozen=True, slots=True)
class Use:
    """One place where the template shows a slot."""

    index: int
    escape: Escape
    strip_left: str | None = ""
    """Characters removed from the left; None for all white space."""
    strip_right: str | None = ""

    def shown(self, slot: Slot) -> str:
        """Return the data as this template shows it.

        Raises
        ------
        TemplateError
            The template changes strings in a way that was not recognised, and this one would be changed.
        """
        if self.escape is Escape.UNKNOWN:
            if not _PLAIN.fullmatch(slot.value) or slot.value != slot.value.strip():
                raise TemplateError(
                    f"the chat template rewrites a string of {slot.owner} in a way that cannot be repeated: "
                    f"{slot.value!r} may hold no quote, backslash, line break or outer white space there"
                )
            return slot.value
        return _ESCAPES[self.escape](slot.value.lstrip(self.strip_left).rstrip(self.strip_right))


@dataclass(frozen=True, slots=True)
class Shape:
    """Template text and slots in turn: ``literals[0] uses[0] literals[1] ... literals[-1]``."""

    literals: tuple[Piece, ...]
    uses: tuple[Use, ...]

    def pieces(self, slots: Sequence[Slot]) -> list[Piece]:
        """Put data into the shape."""
        out = [self.literals[0]]
        for use, literal in zip(self.uses, self.literals[1:], strict=True):
            out += (Piece(use.shown(slots[use.index]), is_data=True), literal)
        return out


def compile_shape(render: Render, slots: Sequence[Slot], tokenizer: PieceTokenizer) -> Shape:
    """Render a shape over marks, and over probes that show trimming and escaping.

    Raises
    ------
    TemplateError
        The template refuses the shape, drops the text of a message, or shows text that is not the turn's own.
    """
    gaps, indices = _parse(render(lambda _: None))
    for index, slot in enumerate(slots):
        if slot.kind in (SlotKind.CONTENT, SlotKind.CALL_NAME) and index not in indices:
            what = "the text" if slot.kind is SlotKind.CONTENT else "the tool calls"
            raise TemplateError(
                f"the chat template drops {what} of {slot.owner} without a word: send it in another role"
            )
    strays = [index for index in indices if index >= len(slots)]
    if strays:
        raise StrayTextError(
            "the chat template repeats earlier text behind the last answer, such as a system message or the "
            "name of a called function: give tool results their 'name', or render the whole conversation anew"
        )
    probed = frozenset(i for i, slot in enumerate(slots) if slot.kind in (SlotKind.CONTENT, SlotKind.TEXT))
    uses = [Use(i, Escape.NONE if i in probed else Escape.UNKNOWN) for i in indices]
    if probed.intersection(indices):
        spaces = _probe(render, probed, " ", gaps, indices)
        newlines = _probe(render, probed, "\n", gaps, indices)
        uses = [
            _merge(use, a, b) if use.index in probed else use
            for use, a, b in zip(uses, spaces, newlines, strict=True)
        ]
    return Shape(tuple(tokenizer.literal(gap) for gap in gaps), tuple(uses))


def _parse(text: str) -> tuple[list[str], list[int]]:
    parts = MARK.split(text)
    return parts[::2], [index_of(digits) for digits in parts[1::2]]


@dataclass(slots=True)
class _Seen:
    """What one padded render shows of one use."""

    escape: Escape = Escape.UNKNOWN
    left_kept: bool | None = None
    right_kept: bool | None = None


def _probe(
    render: Render, probed: frozenset[int], pad: str, gaps: Sequence[str], indices: Sequence[int]
) -> list[_Seen]:
    """Render with padded probes; the pads' lengths (2 left, 3 right) tell them apart in what comes out."""
    seen = [_Seen() for _ in indices]

    def fill(index: int) -> str | None:
        return f"{pad * 2}{mark(index)}{_PROBE}{mark(index)}{pad * 3}" if index in probed else None

    try:
        found_gaps, found = _parse(render(fill))
    except TemplateError:
        return seen
    if found != [index for i in indices for index in ([i, i] if i in probed else [i])]:
        return seen
    outer = [found_gaps[0]]
    at = 1
    for i, use in zip(indices, seen, strict=True):
        if i in probed:
            middle = found_gaps[at]
            use.escape = next((e for e, write in _ESCAPES.items() if write(_PROBE) == middle), Escape.UNKNOWN)
            at += 1
        outer.append(found_gaps[at])
        at += 1
    for place, (bare, padded) in enumerate(zip(gaps, outer, strict=True)):
        before = seen[place - 1] if place and indices[place - 1] in probed else None
        after = seen[place] if place < len(seen) and indices[place] in probed else None
        _compare(bare, padded, pad, before, after)
    return seen


def _compare(bare: str, padded: str, pad: str, before: _Seen | None, after: _Seen | None) -> None:
    """Tell from a gap which pads beside it survived."""

    def choices(use: _Seen | None, count: int) -> list[tuple[bool, str]]:
        if use is None:
            return [(False, "")]
        write = _ESCAPES.get(use.escape)
        return [(False, "")] + ([(True, write(pad * count))] if write else [])

    for right_kept, right in choices(before, 3):
        for left_kept, left in choices(after, 2):
            if right + bare + left == padded:
                if before:
                    before.right_kept = right_kept
                if after:
                    after.left_kept = left_kept
                return


def _merge(use: Use, spaces: _Seen, newlines: _Seen) -> Use:
    known = (spaces.left_kept, spaces.right_kept, newlines.left_kept, newlines.right_kept)
    if spaces.escape is not newlines.escape or None in known:
        return Use(use.index, Escape.UNKNOWN)
    return Use(
        use.index,
        spaces.escape,
        _STRIPPED[bool(spaces.left_kept), bool(newlines.left_kept)],
        _STRIPPED[bool(spaces.right_kept), bool(newlines.right_kept)],
    )


_STRIPPED: Final[Mapping[tuple[bool, bool], str | None]] = {
    (True, True): "",
    (True, False): "\n",
    (False, True): " ",
    (False, False): None,
}
"""What is stripped where spaces, and line breaks, are kept or not."""
