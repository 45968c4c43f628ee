"""Any field value as canonical text: the same value gives the same bytes in every process.

A value stands in the prompt as text, and a change is a change of that text. So the text depends on
nothing but the value: not on the hash seed, the locale, the decimal context or the order in which a
dict was filled.

=====================================  =========================================================
value                                  text
=====================================  =========================================================
``str``                                as it is
``bool``, ``None``                     ``yes`` or ``no``, and ``none``: words that a model reads well
``int``, ``float``                     ``3``, ``0.1``, ``2.0``; ``-0.0`` is ``0.0``
``Decimal``                            exact, its trailing zeros kept, without an exponent
``date``, ``time``, ``datetime``       ISO 8601 with a space, cut to the `Granularity`
``timedelta``                          ``1 day 2 hours``; ``minus`` in front of a negative one
``UUID``                               hyphenated, lower case
``Enum``                               the text of its value
a number of an array library           the text of its ``item()``, if its shape is ``()``
dataclass, named tuple, pydantic       compact JSON object, in the order of the declaration
mapping                                compact JSON object, sorted by the text of the keys
``list``, ``tuple``, ``deque``         compact JSON array, in order
``set``, ``frozenset``                 compact JSON array, sorted by the text of the elements
=====================================  =========================================================

Inside JSON, ``bool`` and ``None`` are ``true``, ``false`` and ``null``, numbers are JSON numbers, and all
else is a JSON string. A pydantic field declared with ``exclude=True`` is left out; extra attributes
of a model follow its fields, sorted by name.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from types import NoneType
from typing import Any, Final, NoReturn
from uuid import UUID

from agentkv.errors import ValueRenderError

_DEPTH: Final = 64
"""Most containers inside one another; far above what a model can read, far below Python's recursion limit."""
_PLACES: Final = 60
"""A decimal with a longer integer or fractional part is written with an exponent."""
_CLOSE_UNITS: Final = frozenset({"%", "‰", "°"})
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False).encode
_UNSEEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, every line separator of `str.splitlines`, and lone surrogates."""


class Granularity(StrEnum):
    """Where the text of a moment or a duration is cut. It is cut, never rounded."""

    DAY = "day"
    HOUR = "hour"
    MINUTE = "minute"
    SECOND = "second"


_UNITS: Final = tuple(Granularity)


class _RefusalError(Exception):
    """A value without canonical text; each level adds its step to the path as it unwinds."""

    def __init__(self, what: str, advice: str) -> None:
        self.what = what
        self.advice = advice
        self.steps: list[str] = []

    def message(self) -> str:
        return f"value{''.join(reversed(self.steps))} {self.what}. {self.advice}"


def canonical(value: object, *, granularity: Granularity | None = None) -> str:
    """Return the canonical text of a field value; the module's table says which.

    Parameters
    ----------
    value
        A value of a type in the table, nested at most 64 deep.
    granularity
        Where dates, times and durations are cut, also those inside a container. By default a time is
        cut to the second and a ``timedelta`` is not cut. A part that the value does not have changes
        nothing: a ``date`` has no hours to cut.

    Raises
    ------
    ValueRenderError
        A part of the value has no canonical text. The message gives the path inside the value and
        what to do, and never the value itself.
    """
    if type(value) is str and value.isascii():
        return value
    render = _SCALARS.get(type(value))
    try:
        return render(value, granularity) if render else _plain(_unwrap(value), granularity)
    except _RefusalError as refusal:
        raise ValueRenderError(refusal.message()) from None


def quoted(text: str) -> str:
    """Return canonical text in the form in which it stands inside one line of a prompt.

    A plain line stands as it is. Anything else becomes a JSON string literal, which is one line and
    decodes to `text`: text with a line separator or another control character, with white space at
    either end, empty text, and text that begins and ends with a double quote (so that no plain text
    reads like the literal of another).
    """
    if text and text == text.strip() and not _UNSEEN.search(text) and not text[0] == text[-1] == '"':
        return text
    return _literal(text)


def is_unicode(text: str) -> bool:
    """Tell whether text can be sent as UTF-8: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_unit(text: str, unit: str | None) -> str:
    """Return `text` followed by its unit, such as ``12 days`` or ``40%``.

    Without a unit, or where the text is ``none`` (there is no value to measure), return `text`.
    """
    if unit is None or text == "none":
        return text
    return f"{text}{unit}" if unit in _CLOSE_UNITS else f"{text} {unit}"


def _literal(text: str) -> str:
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", _ENCODE(text))


def _unwrap(value: Any) -> Any:
    """Return what an enum member, a root model or a number of an array library holds."""
    if type(value) in _SCALARS:
        return value
    while isinstance(value, Enum):
        value = value.value
    if _is_pydantic(value, "RootModel"):
        return _unwrap(value.root)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not shape and hasattr(type(value), "item"):
        if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):
            _refuse(value, "Convert it to a datetime or a timedelta of the standard library.")
        item = value.item()
        if type(item) is not type(value):
            return item
    return value


def _plain(value: Any, granularity: Granularity | None) -> str:
    text = _scalar(value, granularity)
    return _container(value, granularity, []) if text is None else text


def _scalar(value: Any, granularity: Granularity | None) -> str | None:
    """Return the text of a value that is no container, else None."""
    for kind in type(value).__mro__:
        render = _SCALARS.get(kind)
        if render is not None:
            return render(value, granularity)
    return None


def _string(value: str, _: Granularity | None) -> str:
    text = str.__str__(value)  # a subclass may show itself in another form
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _RefusalError(
            f"holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}",
            'It cannot be sent as UTF-8. Decode the bytes it came from with errors="replace".',
        ) from None
    return text


def _integer(value: int, _: Granularity | None) -> str:
    try:
        return int.__repr__(value)
    except ValueError:
        raise _RefusalError("is an integer of too many digits", "Give it as a string.") from None


def _float(value: float, _: Granularity | None) -> str:
    if not math.isfinite(value):
        raise _RefusalError(f"is {float.__repr__(value)}", "Give a finite number, or None for no value.")
    return float.__repr__(value) if value else "0.0"


def _decimal(value: Decimal, _: Granularity | None) -> str:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int):
        raise _RefusalError("is a Decimal that is not finite", "Give a finite number, or None for no value.")
    if not value:
        value = value.copy_abs()
    short = exponent >= -_PLACES and value.adjusted() <= _PLACES
    return format(value, "f" if short else "E")


def _datetime(value: datetime, granularity: Granularity | None) -> str:
    if value != value:  # noqa: PLR0124 - pandas' NaT is a datetime that differs from itself
        raise _RefusalError("is not a time", "Give None for no value.")
    if granularity is Granularity.DAY:
        offset = value.isoformat(timespec="minutes")[len("2026-01-01T00:00") :]
        return value.date().isoformat() + offset
    if granularity is Granularity.HOUR:
        value = value.replace(minute=0)
    return value.isoformat(sep=" ", timespec=_timespec(granularity))


def _time(value: time, granularity: Granularity | None) -> str:
    if granularity is Granularity.DAY:
        raise _RefusalError("is a time of day, and its granularity is a day", "Declare a finer granularity.")
    if granularity is Granularity.HOUR:
        value = value.replace(minute=0)
    return value.isoformat(timespec=_timespec(granularity))


def _timespec(granularity: Granularity | None) -> str:
    return "minutes" if granularity in {Granularity.HOUR, Granularity.MINUTE} else "seconds"


def _duration(value: timedelta, granularity: Granularity | None) -> str:
    length = abs(value)
    minutes, seconds = divmod(length.seconds, 60)
    numbers = [str(length.days), str(minutes // 60), str(minutes % 60), str(seconds)]
    if granularity is None and length.microseconds:
        numbers[-1] = f"{seconds}.{length.microseconds:06d}".rstrip("0")
    finest = _UNITS.index(granularity or Granularity.SECOND)
    named = [
        f"{number} {unit}" if number == "1" else f"{number} {unit}s"
        for number, unit in zip(numbers[: finest + 1], _UNITS, strict=False)
        if number != "0"
    ]
    if not named:
        return f"0 {_UNITS[finest]}s"
    return ("minus " if value < timedelta() else "") + " ".join(named)


_SCALARS: Final[Mapping[type, Callable[[Any, Granularity | None], str]]] = {
    str: _string,
    NoneType: lambda _, __: "none",
    bool: lambda value, _: "yes" if value else "no",
    int: _integer,
    float: _float,
    Decimal: _decimal,
    datetime: _datetime,
    date: lambda value, _: value.isoformat(),
    time: _time,
    timedelta: _duration,
    UUID: lambda value, _: str(value),
}
"""Renderer of each scalar type; a subclass uses that of its nearest base, so `bool` is no `int` here."""


def _json(value: Any, granularity: Granularity | None, outer: list[int]) -> str:
    """Return a value as it stands inside a container; `outer` holds the ids of those around it."""
    value = _unwrap(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = _scalar(value, granularity)
    if text is None:
        return _container(value, granularity, outer)
    return text if isinstance(value, (int, float, Decimal)) else _literal(text)


def _container(value: Any, granularity: Granularity | None, outer: list[int]) -> str:
    if id(value) in outer:
        raise _RefusalError("contains itself", "Give a value without cycles.")
    if len(outer) == _DEPTH:
        raise _RefusalError(f"is nested more than {_DEPTH} deep", "Give a flatter value.")
    outer.append(id(value))
    if isinstance(value, (list, tuple, deque)) and not hasattr(value, "_fields"):
        text = f"[{','.join(_items(value, granularity, outer))}]"
    elif isinstance(value, Mapping):
        text = _object(_keyed(value, granularity), "[{}]", granularity, outer)
    elif isinstance(value, AbstractSet):
        text = f"[{','.join(sorted(_items(value, granularity, outer)))}]"
    else:
        text = _object(_attributes(value), ".{}", granularity, outer)
    outer.pop()
    return text


def _items(values: Iterable[Any], granularity: Granularity | None, outer: list[int]) -> list[str]:
    texts: list[str] = []
    for value in tuple(values):
        try:
            texts.append(_json(value, granularity, outer))
        except _RefusalError as refusal:
            refusal.steps.append("{…}" if isinstance(values, AbstractSet) else f"[{len(texts)}]")
            raise
    return texts


def _object(
    pairs: Iterable[tuple[str, Any]], step: str, granularity: Granularity | None, outer: list[int]
) -> str:
    members: list[str] = []
    for name, value in pairs:
        try:
            members.append(f"{_literal(name)}:{_json(value, granularity, outer)}")
        except _RefusalError as refusal:
            refusal.steps.append(step.format(name if step == ".{}" else _literal(name)))
            raise
    return "{" + ",".join(members) + "}"


def _keyed(mapping: Mapping[Any, Any], granularity: Granularity | None) -> list[tuple[str, Any]]:
    """Return the items of a mapping under the text of their keys, sorted by it."""
    pairs: dict[str, Any] = {}
    for index, (key, value) in enumerate(tuple(mapping.items())):
        try:
            text = _plain(_unwrap(key), granularity)
        except _RefusalError as refusal:
            refusal.steps.append(f"[key {index}]")
            raise
        if text in pairs:
            raise _RefusalError(f"has two keys with the text {_literal(text)}", "Make their texts differ.")
        pairs[text] = value
    return sorted(pairs.items(), key=lambda pair: pair[0])


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return names and values of a named tuple, dataclass or pydantic model in declared order."""
    extra: dict[str, Any] = {}
    if isinstance(value, tuple):
        names = list(getattr(value, "_fields", ()))
    elif is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
    elif _is_pydantic(value, "BaseModel"):
        names = [name for name, field in type(value).model_fields.items() if not field.exclude]
        extra = value.model_extra or {}
    else:
        _refuse(value)
    try:
        return [(name, getattr(value, name)) for name in names] + sorted(extra.items())
    except AttributeError as error:
        raise _RefusalError(
            f"is a {type(value).__qualname__} without its attribute {error.name!r}", "Set it first."
        ) from None


def _is_pydantic(value: object, name: str) -> bool:
    """Tell whether `value` is of a class of pydantic, which is not imported for the question."""
    kind = getattr(sys.modules.get("pydantic"), name, None) if hasattr(type(value), "model_fields") else None
    return isinstance(kind, type) and isinstance(value, kind)


def _refuse(value: object, advice: str = "") -> NoReturn:
    kind = type(value)
    if not advice:
        if isinstance(value, (bytes, bytearray, memoryview)):
            advice = "Decode it to a string first."
        elif hasattr(kind, "__next__"):
            advice = "An iterator can be read once only: give a list or a tuple."
        elif hasattr(kind, "tolist"):
            advice = "Give its tolist()."
        else:
            advice = "Give a string, number, date, enum, dataclass, pydantic model or a container of these."
    raise _RefusalError(f"is a {kind.__module__}.{kind.__qualname__}, which has no canonical text", advice)
