"""Tokenise template text and data together so that no control id can come from data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agentkv.errors import TemplateError
from agentkv.tokenizer import ChatTokenizer

_JOIN_PROBES: Final = ("|end|>", "b", "<", " c", "d e", "\nf", "é")
_LONGEST_ANCHOR_SEARCH: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text of one origin."""

    text: str
    is_data: bool
    controls: tuple[int, ...] = ()
    """Control ids that the tokenizer finds in it; always empty for data."""


class PieceTokenizer:
    """Turns pieces into ids.

    Text between control tokens is tokenised in one run, template and data together, so the ids are those of
    the whole text. Only where data would make a control id is the text cut inside that control token.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._encode = tokenizer.encode
        self._decode = tokenizer.decode
        self._text_of = {id_: text for text, id_ in tokenizer.control_tokens.items()}
        self.control_ids: Final = frozenset(self._text_of)
        self._anchor, self._anchor_ids = self._find_anchor()

    def literal(self, text: str) -> Piece:
        """Make a piece of template text; the control tokens in it are meant."""
        return Piece(text, is_data=False, controls=self.controls(self._encode(text)))

    def controls(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Pick the control ids, in order."""
        return tuple(id_ for id_ in ids if id_ in self.control_ids)

    def holds_control(self, text: str) -> bool:
        """Whether encoding `text` makes a control id."""
        return not self.control_ids.isdisjoint(self._encode(text))

    def encode(self, pieces: Sequence[Piece], *, continues: bool) -> list[int]:
        """Encode pieces to ids.

        Parameters
        ----------
        continues
            Whether other ids stand before these, so that no beginning-of-text mark may be added.

        Raises
        ------
        TemplateError
            A single character of data is a control token and cannot be cut.
        """
        text = "".join(piece.text for piece in pieces)
        if not text:
            return []
        ids = self._continue(text) if continues else self._encode(text)
        expected = tuple(id_ for piece in pieces for id_ in piece.controls)
        found = self.controls(ids)
        if found == expected or not any(piece.is_data for piece in pieces):
            return ids
        cuts = sorted(self._cuts(text, pieces, found) or _halves(pieces))
        if not cuts:
            raise TemplateError(
                f"the text {text!r} of a message is itself one control token of this tokenizer and cannot be "
                "sent as data: replace that character"
            )
        out: list[int] = []
        for part in _split(pieces, cuts):
            out += self.encode(part, continues=continues or bool(out))
        return out

    def _cuts(self, text: str, pieces: Sequence[Piece], found: Sequence[int]) -> set[int]:
        """Offsets in `text`, each inside an occurrence of a control token that data has a part in."""
        cuts: set[int] = set()
        spans = list(_data_spans(pieces))
        for control in {self._text_of[id_] for id_ in found}:
            for start, stop in spans:
                at = text.find(control, max(0, start - len(control) + 1))
                while at >= 0 and (at < stop or at < start):
                    if at + len(control) > start:
                        cuts.add(max(at + 1, start))
                    at = text.find(control, at + 1)
        return {cut for cut in cuts if 0 < cut < len(text)}

    def _continue(self, text: str) -> list[int]:
        if not self._anchor:
            return self._encode(text)
        ids = self._encode(self._anchor + text)
        head = len(self._anchor_ids)
        return ids[head:] if ids[:head] == self._anchor_ids else self._encode(text)

    def _find_anchor(self) -> tuple[str, list[int]]:
        """Find a text behind which others are encoded as continuing; empty where none is needed."""
        controls = sorted(self._text_of.values())[:_LONGEST_ANCHOR_SEARCH]
        for anchor in ("", *controls, "\n", ".", "a"):
            head = self._encode(anchor) if anchor else []
            if all(self._joins(anchor, head, probe) for probe in _JOIN_PROBES):
                return anchor, head
        return "", []

    def _joins(self, anchor: str, head: list[int], probe: str) -> bool:
        ids = self._encode(anchor + probe)
        return (
            ids[: len(head)] == head and self._decode([*self._encode("x"), *ids[len(head) :]]) == "x" + probe
        )


def _data_spans(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    at = 0
    for piece in pieces:
        if piece.is_data:
            yield at, at + len(piece.text)
        at += len(piece.text)


def _halves(pieces: Sequence[Piece]) -> set[int]:
    """Cut the longest data in two, or, if all are single characters, part data from template.

    For control tokens that a normalizer makes out of other characters, which no search finds.
    """
    start, stop = max(_data_spans(pieces), key=lambda span: span[1] - span[0])
    if stop - start > 1:
        return {(start + stop) // 2}
    length = sum(len(piece.text) for piece in pieces)
    return {edge for span in _data_spans(pieces) for edge in span if 0 < edge < length}


def _split(pieces: Sequence[Piece], cuts: Sequence[int]) -> Iterator[list[Piece]]:
    """Split pieces at offsets of their joined text; only data is ever divided."""
    pending = list(cuts)
    part: list[Piece] = []
    at = 0
    for piece in pieces:
        rest = piece
        while pending and pending[0] <= at + len(rest.text):
            head = pending.pop(0) - at
            if head == len(rest.text) and not rest.is_data:
                part.append(rest)
                yield part
                part, at, rest = [], at + head, Piece("", is_data=False)
                continue
            left = rest.text[:head]
            if left:
                part.append(Piece(left, rest.is_data))
            if part:
                yield part
            part, at, rest = [], at + head, Piece(rest.text[head:], rest.is_data, rest.controls)
        if rest.text:
            part.append(rest)
        at += len(rest.text)
    if part:
        yield part
