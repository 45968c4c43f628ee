"""Token ids as an append-only sequence that is cheap to extend and to compare.

A conversation's prompt only grows, so each turn's ids share one buffer with the ids of the turn
before: extending costs the new tokens only, and two sequences over one buffer compare in O(1).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator
from typing import Final

_TYPECODE: Final = "I"
_CHUNK: Final = 4096


class _Buffer:
    """Ids that several sequences share; only its end is ever written."""

    __slots__ = ("ids", "lock")

    def __init__(self, ids: array[int]) -> None:
        self.ids = ids
        self.lock = threading.Lock()


class TokenIds:
    """An immutable sequence of token ids.

    Parameters
    ----------
    ids
        Token ids, each in ``[0, 2**32)``.

    Raises
    ------
    OverflowError
        An id is negative or does not fit 32 bits.
    """

    __slots__ = ("_buffer", "_highest", "_length")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._buffer = _Buffer(array(_TYPECODE, ids))
        self._length = len(self._buffer.ids)
        self._highest: int | None = None

    @classmethod
    def _over(cls, buffer: _Buffer, length: int, highest: int | None = None) -> TokenIds:
        made = cls.__new__(cls)
        made._buffer = buffer
        made._length = length
        made._highest = highest
        return made

    def extend(self, ids: Iterable[int]) -> TokenIds:
        """Return these ids followed by `ids`; costs O(new) unless a different extension came first."""
        new = array(_TYPECODE, ids)
        if not new:
            return self
        buffer, start, end = self._buffer, self._length, self._length + len(new)
        highest = None if self._highest is None else max(self._highest, *new)
        with buffer.lock:
            # The model's cache and the conversation both append the answer: the second finds it there.
            there = buffer.ids[start:end]
            if there == new[: len(there)]:
                buffer.ids.extend(new[len(there) :])
                return TokenIds._over(buffer, end, highest)
            own = buffer.ids[:start]
        own.extend(new)
        return TokenIds._over(_Buffer(own), end, highest)

    def prefix(self, length: int) -> TokenIds:
        """Return the first `length` ids, sharing the buffer."""
        return TokenIds._over(self._buffer, max(0, min(length, self._length)))

    def common_prefix(self, other: TokenIds) -> int:
        """Count the leading ids that both sequences share."""
        most = min(self._length, other._length)
        if self._buffer is other._buffer:
            return most
        mine, theirs = self._buffer.ids, other._buffer.ids
        at = 0
        while at < most:
            stop = min(at + _CHUNK, most)
            if mine[at:stop] == theirs[at:stop]:
                at = stop
                continue
            for index in range(at, stop):
                if mine[index] != theirs[index]:
                    return index
        return most

    def highest(self) -> int:
        """Return the highest id, 0 if there is none; remembered, so that extensions look at new ids only."""
        if self._highest is None:
            self._highest = max(self._buffer.ids[: self._length], default=0)
        return self._highest

    def tolist(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Copy the ids in ``[start, stop)`` into a list."""
        end = self._length if stop is None else min(stop, self._length)
        return self._buffer.ids[start:end].tolist()

    def tobytes(self) -> bytes:
        """Copy the ids as native 32-bit words, for a digest."""
        return self._buffer.ids[: self._length].tobytes()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for index in range(self._length):
            yield self._buffer.ids[index]

    def __getitem__(self, index: int) -> int:
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._buffer.ids[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenIds):
            return NotImplemented
        return self._length == other._length and self.common_prefix(other) == self._length

    def __hash__(self) -> int:
        return hash(self.tobytes())

    def __repr__(self) -> str:
        head = ", ".join(map(str, self.tolist(0, 6)))
        return f"TokenIds([{head}{', …' if self._length > 6 else ''}], length={self._length})"
