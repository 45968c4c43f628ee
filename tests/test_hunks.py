"""The one place in which two texts differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentkv.hunks import Hunk, find_hunk

TEXTS = st.text(alphabet="ab\n", max_size=12)


@given(TEXTS, TEXTS)
def test_hunk_turns_one_text_into_the_other(old: str, new: str) -> None:
    """Replacing `old` by `new` at `start` gives the new text."""
    hunk = find_hunk(old, new)
    end = hunk.start + len(hunk.old)
    assert old[hunk.start : end] == hunk.old
    assert old[: hunk.start] + hunk.new + old[end:] == new


@given(TEXTS, TEXTS)
def test_hunk_is_as_small_as_it_can_be(old: str, new: str) -> None:
    """Its two sides share neither their first nor their last character."""
    hunk = find_hunk(old, new)
    if hunk.old and hunk.new:
        assert hunk.old[0] != hunk.new[0]
        assert hunk.old[-1] != hunk.new[-1]


def test_equal_texts_have_an_empty_hunk() -> None:
    """Nothing is replaced by nothing, at the end."""
    assert find_hunk("abc", "abc") == Hunk(3, "", "")


def test_repeated_letters_do_not_overlap() -> None:
    """The common end is not counted into the common beginning."""
    assert find_hunk("aaa", "aaaa") == Hunk(3, "", "a")
