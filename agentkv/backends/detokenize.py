"""Generated ids to text, piece by piece: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentkv.tokenizer import ChatTokenizer

_INCOMPLETE: Final = "\ufffd"


class Detokenizer:
    """Decodes ids as they come; the bytes of an unfinished character are held back.

    Each piece is decoded together with the ids of the piece before, because a tokenizer may treat the
    first id of a text in its own way, such as by leaving out its space.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Add an id and return the text that is now complete, possibly empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """Return what is held back, with replacement characters for bytes that never became one."""
        if self._read == len(self._ids):
            return ""
        return self._take(self._tokenizer.decode(self._ids[self._context :]))

    def _take(self, text: str) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]


class StopScanner:
    """Passes text on up to the first stop string; what could begin one is held back.

    The stop string that is complete first ends the text, however the text is cut into pieces; of two that
    end together, the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string was met; nothing is passed on from then on."""

    def push(self, text: str) -> str:
        """Add text and return what may be passed on."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            passed = self._held[: min(ends)[1]]
            self._held = ""
            return passed
        held = self._open_length()
        passed, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return passed

    def flush(self) -> str:
        """Return what is held back: no stop string will follow."""
        passed, self._held = self._held, ""
        return passed

    def _open_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """The text of one answer while it is generated."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._scanner.stopped

    @property
    def text(self) -> str:
        """All text passed on so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add an id and return the text that may be passed on."""
        return self._pass(self._scanner.push(self._detokenizer.push(token)))

    def flush(self) -> str:
        """End the answer and return the text held back until now."""
        rest = self._scanner.push(self._detokenizer.flush())
        return self._pass(rest + self._scanner.flush())

    def _pass(self, text: str) -> str:
        self._pieces.append(text)
        return text
