"""Every type of field value has one canonical text, and what has none is refused with its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel

from agentkv.errors import ValueRenderError
from agentkv.values import Granularity, canonical, quoted, with_unit

DAY, HOUR, MINUTE, SECOND = Granularity
MOMENT = datetime(2026, 3, 1, 14, 59, 58, 999_999)  # noqa: DTZ001 - a naive one is a case of its own
AWARE = MOMENT.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))


class Colour(Enum):
    RED = "red"
    PAIR = (1, "x")


class Level(IntEnum):
    HIGH = 3


class Status(StrEnum):
    OPEN = "open"


class Point(NamedTuple):
    y: int
    x: int


@dataclass
class Address:
    street: str
    zip_code: int | None = None


class Customer(BaseModel):
    name: str
    token: str = Field(default="secret", exclude=True)
    address: Address | None = None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Tags(RootModel[list[str]]):
    pass


class Word(RootModel[str]):
    pass


class Shout(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not this"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("in transit", "in transit"),
        ("", ""),
        ("zwölf\n", "zwölf\n"),
        (Shout("this"), "this"),
        (3, "3"),
        (-(10**40), "-1" + "0" * 40),
        (0.1, "0.1"),
        (2.0, "2.0"),
        (-0.0, "0.0"),
        (1e300, "1e+300"),
        (True, "yes"),
        (False, "no"),
        (None, "none"),
        (Colour.RED, "red"),
        (Colour.PAIR, '[1,"x"]'),
        (Level.HIGH, "3"),
        (Status.OPEN, "open"),
        (UUID("12345678-1234-5678-1234-56781234ABCD"), "12345678-1234-5678-1234-56781234abcd"),
        (Decimal("1.50"), "1.50"),
        (Decimal("1E+3"), "1000"),
        (Decimal("1E-7"), "0.0000001"),
        (Decimal("-0.00"), "0.00"),
        (Decimal("1E+5000"), "1E+5000"),
        (np.float64(0.5), "0.5"),
        (np.int32(7), "7"),
        (np.bool_(True), "yes"),
        (np.str_("word"), "word"),
        (np.array(7), "7"),
    ],
)
def test_scalar_has_this_text(value: object, text: str) -> None:
    """A scalar is written as the table of the module says."""
    assert canonical(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", 1, None, True, 0.5], '["a",1,null,true,0.5]'),
        ((1, (2, ())), "[1,[2,[]]]"),
        (deque([1, 2]), "[1,2]"),
        ({"b": 1, "a": [False]}, '{"a":[false],"b":1}'),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        ({2: "x", 10: "y"}, '{"10":"y","2":"x"}'),
        ({("b", 1): 1, Status.OPEN: 2}, '{"[\\"b\\",1]":1,"open":2}'),
        ({"b", "a", "c"}, '["a","b","c"]'),
        (frozenset({2, 10}), "[10,2]"),
        (Point(y=1, x=2), '{"y":1,"x":2}'),
        (Address("Hauptstraße"), '{"street":"Hauptstraße","zip_code":null}'),
        (
            Customer(name="Ada", address=Address("A")),
            '{"name":"Ada","address":{"street":"A","zip_code":null}}',
        ),
        (Loose.model_validate({"z": 1, "name": "n", "a": 2}), '{"name":"n","a":2,"z":1}'),
        (Tags(["x"]), '["x"]'),
        (Word("plain"), "plain"),
        ([Decimal("1.50"), date(2026, 3, 1), Colour.RED], '[1.50,"2026-03-01","red"]'),
        (["line\u2028break\x85 \x7f"], '["line\\u2028break\\u0085 \\u007f"]'),
    ],
)
def test_container_is_compact_json(value: object, text: str) -> None:
    """A container is one line of JSON in a stable order."""
    assert canonical(value) == text


@pytest.mark.parametrize(
    ("value", "granularity", "text"),
    [
        (MOMENT, None, "2026-03-01 14:59:58"),
        (MOMENT, SECOND, "2026-03-01 14:59:58"),
        (MOMENT, MINUTE, "2026-03-01 14:59"),
        (MOMENT, HOUR, "2026-03-01 14:00"),
        (MOMENT, DAY, "2026-03-01"),
        (AWARE, None, "2026-03-01 14:59:58+05:30"),
        (AWARE, HOUR, "2026-03-01 14:00+05:30"),
        (AWARE, DAY, "2026-03-01+05:30"),
        (datetime(2026, 7, 1, 9, tzinfo=ZoneInfo("Europe/Berlin")), DAY, "2026-07-01+02:00"),
        (datetime(2026, 7, 1, 9, tzinfo=UTC), MINUTE, "2026-07-01 09:00+00:00"),
        (date(2026, 3, 1), None, "2026-03-01"),
        (date(2026, 3, 1), HOUR, "2026-03-01"),
        (time(23, 59, 59, 5), None, "23:59:59"),
        (time(23, 59, 59), MINUTE, "23:59"),
        (time(23, 59, 59), HOUR, "23:00"),
        (timedelta(days=1, hours=2, seconds=1.5), None, "1 day 2 hours 1.5 seconds"),
        (timedelta(seconds=59.9), SECOND, "59 seconds"),
        (timedelta(minutes=1), None, "1 minute"),
        (timedelta(days=2, hours=23), DAY, "2 days"),
        (timedelta(hours=23), DAY, "0 days"),
        (timedelta(), None, "0 seconds"),
        (-timedelta(hours=1), None, "minus 1 hour"),
        (-timedelta(seconds=1), DAY, "0 days"),
        ([MOMENT], DAY, '["2026-03-01"]'),
    ],
)
def test_moment_is_cut_to_its_granularity(value: object, granularity: Granularity | None, text: str) -> None:
    """Dates, times and durations are cut, never rounded, and keep their offset."""
    assert canonical(value, granularity=granularity) == text


def test_text_does_not_depend_on_the_decimal_context() -> None:
    """Precision and the case of the exponent come from the value alone."""
    with localcontext() as context:
        context.prec, context.capitals = 2, 0
        assert canonical(Decimal("1.23456")) == "1.23456"
        assert canonical(Decimal("1E+500")) == "1E+500"


def test_text_does_not_depend_on_the_hash_seed() -> None:
    """Processes of different hash seeds write the same bytes."""
    program = (
        "from agentkv.values import canonical\n"
        "print(canonical([{f'word {n}' for n in range(50)}, {f'k{n}': n for n in {'a', 'b', 'c'}}, "
        "frozenset({(1, 'x'), (2, 'y')})]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(texts) == 1


def _cycle() -> object:
    inner: dict[str, Any] = {}
    inner["self"] = [inner]
    return inner


def _deep() -> object:
    value: list[Any] = []
    for _ in range(64):
        value = [value]
    return value


def _without_attribute() -> object:
    made = Address("A")
    del made.street
    return made


@dataclass
class Box:
    items: list[Any] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "place", "why"),
    [
        (object(), "value is a builtins.object", "no canonical text"),
        (Address, "value is a builtins.type", "no canonical text"),
        (len, "value is a builtins.builtin_function_or_method", "no canonical text"),
        (b"x", "value is a builtins.bytes", "Decode it"),
        (iter([1]), "value is a builtins.list_iterator", "give a list"),
        ((n for n in "a"), "value is a builtins.generator", "give a list"),
        (np.array([1, 2]), "value is a numpy.ndarray", "tolist"),
        (np.datetime64("2026-01-01"), "value is a numpy.datetime64", "standard library"),
        (float("nan"), "value is nan", "finite"),
        (float("-inf"), "value is -inf", "finite"),
        (Decimal("NaN"), "value is a Decimal", "finite"),
        (Decimal("Infinity"), "value is a Decimal", "finite"),
        ([10**5000], "value[0] is an integer", "string"),
        ("ab\ud800", "value holds a lone surrogate, U+D800, at character 2", "Decode"),
        (_deep(), "value" + "[0]" * 64 + " is nested more than 64 deep", "flatter"),
        (_cycle(), 'value["self"][0] contains itself', "without cycles"),
        (_without_attribute(), "value is a Address without its attribute 'street'", "Set it"),
        ({1: "a", "1": "b"}, 'value has two keys with the text "1"', "differ"),
        (Box([1, {"x": object()}]), 'value.items[1]["x"] is a builtins.object', "no canonical text"),
        ({1: 2, object(): 3}, "value[key 1] is a builtins.object", "no canonical text"),
        ({float("inf")}, "value{…} is inf", "finite"),
        (["\udc00"], "value[0] holds a lone surrogate", "Decode"),
        (Point(1, float("nan")), "value.x is nan", "finite"),  # type: ignore[arg-type]
        (Loose.model_validate({"name": "n", "b": b""}), "value.b is a builtins.bytes", "Decode"),
    ],
)
def test_value_without_text_is_refused_with_its_place(value: object, place: str, why: str) -> None:
    """The message gives the path inside the value and what to do."""
    with pytest.raises(ValueRenderError) as caught:
        canonical(value)
    assert str(caught.value).startswith(place)
    assert why in str(caught.value)


def test_not_a_time_is_refused() -> None:
    """A datetime that differs from itself, as pandas' NaT, has no text."""

    class NotATime(datetime):
        def __ne__(self, other: object) -> bool:
            return True

    with pytest.raises(ValueRenderError, match="not a time"):
        canonical(NotATime(2026, 1, 1))


def test_time_of_day_cannot_be_cut_to_the_day() -> None:
    """Nothing would be left of it."""
    with pytest.raises(ValueRenderError, match="finer granularity"):
        canonical(time(12), granularity=DAY)


def test_shared_part_is_no_cycle() -> None:
    """The same list in two places is written twice."""
    shared = [1]
    assert canonical([shared, shared]) == "[[1],[1]]"


def test_refusal_does_not_repeat_the_value() -> None:
    """A value may be a secret: the message names its type and place only."""

    class Secret:
        def __repr__(self) -> str:
            return "hunter2"

    with pytest.raises(ValueRenderError) as caught:
        canonical([Secret()])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["delivered", "a b", 'say "hi"', '"hi" he said', "zwölf €", "👩‍👧"])
def test_plain_line_is_not_quoted(text: str) -> None:
    """One line of ordinary text stands as it is."""
    assert quoted(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", '""'),
        (" a", '" a"'),
        ("a\u00a0", '"a\u00a0"'),
        ("a\nb", r'"a\nb"'),
        ("a\r\n", r'"a\r\n"'),
        ("a\x85b", r'"a\u0085b"'),
        ("a\u2028b\u2029", r'"a\u2028b\u2029"'),
        ("a\vb\fc", r'"a\u000bb\fc"'),
        ("a\x1cb", r'"a\u001cb"'),
        ("a\x7fb\x00", r'"a\u007fb\u0000"'),
        ("a\ud800b", r'"a\ud800b"'),
        ('"a\\nb"', r'"\"a\\nb\""'),
        ('"', r'"\""'),
    ],
)
def test_any_other_text_is_a_json_literal(text: str, line: str) -> None:
    """What is no plain line, or reads like a literal itself, is quoted."""
    assert quoted(text) == line


@pytest.mark.parametrize(
    ("text", "unit", "shown"),
    [
        ("12", "days", "12 days"),
        ("40", "%", "40%"),
        ("12", None, "12"),
        (canonical(None), "days", "none"),
    ],
)
def test_unit_stands_behind_a_value(text: str, unit: str | None, shown: str) -> None:
    """A unit is part of the text, unless there is no value."""
    assert with_unit(text, unit) == shown


def test_numbers_of_other_libraries_are_asked_once() -> None:
    """A number whose ``item()`` is of its own type has no text instead of an endless loop."""
    make: Callable[[int], Any] = np.longdouble
    with pytest.raises(ValueRenderError, match="longdouble"):
        canonical(make(1))
