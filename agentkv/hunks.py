"""The one place in which two long texts differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hunk:
    """What stands between the common beginning and the common end of two texts."""

    start: int
    """Characters that both begin with."""
    old: str
    new: str


def find_hunk(old: str, new: str) -> Hunk:
    """Return the smallest single replacement that turns `old` into `new`; O(n) for n characters."""
    start = _common_prefix(old, new, min(len(old), len(new)))
    end = _common_prefix(old[::-1], new[::-1], min(len(old), len(new)) - start)
    return Hunk(start, old[start : len(old) - end], new[start : len(new) - end])


def _common_prefix(left: str, right: str, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
