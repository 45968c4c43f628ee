"""Token ids that share one buffer while they grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentkv.tokens import TokenIds

SOME = st.lists(st.integers(0, 3), max_size=6)


@given(SOME, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), SOME), max_size=12))
def test_any_tree_of_extensions_reads_as_lists_do(
    start: list[int], steps: list[tuple[int, int, list[int]]]
) -> None:
    """Whatever is cut and extended, in whatever order: no sequence changes another, nor its highest id."""
    made = [(TokenIds(start), start)]
    for which, length, new in steps:
        ids, expected = made[which % len(made)]
        if which % 2:
            ids.highest()
        made.append((ids.prefix(length).extend(new), [*expected[:length], *new]))
        made.append((ids.extend(new), [*expected, *new]))
    for ids, expected in made:
        assert ids.tolist() == expected
        assert ids.highest() == max(expected, default=0)


def test_the_same_extension_is_made_once() -> None:
    """Two parties that append the same ids, one a few at a time, go on sharing one buffer."""
    prompt = TokenIds([1, 2])
    cache = prompt.extend([3]).extend([4])
    told = prompt.extend([3, 4, 5])
    assert told._buffer is cache._buffer is prompt._buffer
    other = prompt.extend([3, 9])
    assert other._buffer is not prompt._buffer
    assert (told.tolist(), cache.tolist(), other.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 9])


def test_the_highest_id_is_looked_for_in_new_ids_only() -> None:
    """What was looked at stays looked at: a change there would go unseen."""
    ids = TokenIds([5, 1])
    assert ids.highest() == 5
    ids._buffer.ids[0] = 9
    assert ids.extend([7, 2]).highest() == 7
    assert ids.prefix(1).highest() == 9
