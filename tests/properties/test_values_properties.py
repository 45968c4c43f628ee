"""What holds for the text of every value."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentkv.values import Granularity, canonical, quoted

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False),
    st.text(),
    st.dates(),
    st.datetimes(timezones=st.none() | st.timezones()),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from(Granularity),
)
VALUES = st.recursive(
    SCALARS | st.frozensets(st.text() | st.integers()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
LINE_BREAKERS = st.text(st.sampled_from('ab "\\\n\r\t\v\f\x00\x1c\x1d\x1e\x1f\x7f\x85\u00a0\u2028\u2029'))


@given(VALUES)
def test_supported_value_has_one_text(value: Any) -> None:
    """A value of supported types never raises, and two readings agree."""
    assert canonical(value) == canonical(value)


@given(st.lists(VALUES) | st.dictionaries(st.text(), VALUES) | st.frozensets(st.text()))
def test_container_is_one_line_of_json(value: Any) -> None:
    """The text of a container is a plain line that a JSON reader accepts."""
    text = canonical(value)
    assert quoted(text) == text
    assert len(json.loads(text, parse_float=str)) == len(value)


@given(st.dictionaries(st.text(), VALUES), st.randoms(use_true_random=False))
def test_order_of_insertion_does_not_matter(value: dict[str, Any], order: random.Random) -> None:
    """Equal dicts have equal text, in whatever order they were filled."""
    items = list(value.items())
    order.shuffle(items)
    assert canonical(dict(items)) == canonical(value)


@given(st.lists(st.text() | st.integers() | st.tuples(st.integers())), st.randoms(use_true_random=False))
def test_order_of_a_set_does_not_matter(values: list[Any], order: random.Random) -> None:
    """Equal sets have equal text, in whatever order they were filled."""
    shuffled = list(values)
    order.shuffle(shuffled)
    assert canonical(set(values)) == canonical(frozenset(shuffled))


@given(st.text() | LINE_BREAKERS)
def test_quoted_text_is_one_line_and_can_be_read_back(text: str) -> None:
    """The form in a line holds no line separator, and gives the text back."""
    line = quoted(text)
    assert line.splitlines() == [line]
    assert line.strip() == line
    assert line == text or json.loads(line) == text


@given(LINE_BREAKERS, LINE_BREAKERS)
def test_different_texts_are_quoted_differently(one: str, other: str) -> None:
    """No text can pass for another one."""
    assert (quoted(one) == quoted(other)) == (one == other)
