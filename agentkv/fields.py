"""Declare which attributes of a class the prompt shows, and read their current values.

::

    @mutable_fields
    class Order:
        status: str = mutable(label="Order status")
        weight: int = mutable(unit="kg", default=0)
        warehouse: str = "north"  # an ordinary attribute: the prompt does not show it

A value is rendered when it is set, so one that cannot be shown is refused where the mistake is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, Final, TypeVar, cast, dataclass_transform, overload
from uuid import UUID

from agentkv.errors import FieldError, ValueRenderError
from agentkv.values import Granularity, canonical, with_unit

_T = TypeVar("_T")
_DECLARATION: Final = "agentkv"
_TABLE: Final = "__agentkv_fields__"
_TEXTS: Final = "_agentkv_texts"
_KEY: Final = re.compile(r"[A-Za-z0-9_:-]+")
_CLASS_KEY: Final = re.compile(r"[A-Za-z0-9_.:-]+")
_DUNDER: Final = re.compile(r"__\w+__")
"""What Python itself sets on an instance, such as ``__orig_class__`` of a generic class."""
_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_IMMUTABLE: Final = frozenset(
    {str, int, float, bool, NoneType, Decimal, UUID, date, time, datetime, timedelta}
)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One mutable field of a class."""

    attribute: str
    """Name of the attribute."""
    key: str
    """Stable name within the object, such as ``"status"``; by default that of the attribute."""
    label: str
    """What the prompt calls it; one line."""
    unit: str | None = None
    """Unit that stands behind the value."""
    granularity: Granularity | None = None
    """Where dates, times and durations are cut."""
    sensitive: bool = False
    """The old value is never repeated, and the object's repr leaves the attribute out."""
    critical: bool = False
    """A wrong belief about it does harm: rewrite the prompt where the model heeds errata too rarely."""
    depends_on: tuple[str, ...] = ()
    """Keys of the fields whose change voids what was concluded about this one."""


@dataclass(frozen=True, slots=True)
class _Declaration:
    """What `mutable` was told, before the attribute's name is known."""

    label: str | None
    key: str | None
    unit: str | None
    granularity: Granularity | None
    sensitive: bool
    critical: bool
    depends_on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """What a decorated class knows of its fields."""

    key: str
    specs: tuple[FieldSpec, ...]
    by_attribute: Mapping[str, FieldSpec]
    attributes: frozenset[str]
    """Every dataclass attribute, mutable or not."""


@overload
def mutable(
    *,
    default: _T,
    label: str | None = None,
    unit: str | None = None,
    granularity: Granularity | None = None,
    sensitive: bool = False,
    critical: bool = False,
    depends_on: tuple[str, ...] = (),
    key: str | None = None,
) -> _T: ...
@overload
def mutable(
    *,
    default_factory: Callable[[], _T],
    label: str | None = None,
    unit: str | None = None,
    granularity: Granularity | None = None,
    sensitive: bool = False,
    critical: bool = False,
    depends_on: tuple[str, ...] = (),
    key: str | None = None,
) -> _T: ...
@overload
def mutable(
    *,
    label: str | None = None,
    unit: str | None = None,
    granularity: Granularity | None = None,
    sensitive: bool = False,
    critical: bool = False,
    depends_on: tuple[str, ...] = (),
    key: str | None = None,
) -> Any: ...
def mutable(
    *,
    label: str | None = None,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    unit: str | None = None,
    granularity: Granularity | None = None,
    sensitive: bool = False,
    critical: bool = False,
    depends_on: tuple[str, ...] = (),
    key: str | None = None,
) -> Any:
    """Declare an attribute of a `mutable_fields` class as a field that the prompt shows.

    Parameters
    ----------
    label
        What the prompt calls it; one line. By default the attribute's name in words.
    default, default_factory
        As of `dataclasses.field`; without either the constructor asks for the value.
    unit
        Unit that stands behind the value, such as ``"days"``; not behind None.
    granularity
        Where dates, times and durations are cut.
    sensitive
        Never repeat an old value of it.
    critical
        A wrong belief about it does harm: rewrite the prompt where the model heeds errata too rarely.
    depends_on
        Keys of the fields whose change voids what was concluded about this one.
    key
        Stable name within the object: letters, digits and ``_ : -``. Give one before you
        rename the attribute, so that stored conversations still know the field.

    Raises
    ------
    FieldError
        An option is malformed, or both defaults are given.
    """
    for name, text in (("label", label), ("unit", unit)):
        if text is not None and (not text or not text.isprintable() or text != text.strip()):
            raise FieldError(f"{name} {text!r} must be one line of printable text without outer spaces")
    if granularity is not None and not isinstance(granularity, Granularity):
        raise FieldError(f"granularity {granularity!r} is unknown; give a member of Granularity")
    if not isinstance(depends_on, tuple) or not all(isinstance(one, str) and one for one in depends_on):
        raise FieldError(f"depends_on {depends_on!r} is not a tuple of field keys, such as ('status',)")
    if default is not MISSING and default_factory is not MISSING:
        raise FieldError("a field has both default and default_factory; give one of them")
    declaration = _Declaration(label, key, unit, granularity, sensitive, critical, depends_on)
    made: Any = field(
        default=default,
        default_factory=default_factory,
        repr=not sensitive,
        metadata={_DECLARATION: declaration},
    )
    return made


@overload
def mutable_fields(cls: type[_T], /) -> type[_T]: ...
@overload
def mutable_fields(*, key: str | None = None) -> Callable[[type[_T]], type[_T]]: ...
@dataclass_transform(eq_default=False, field_specifiers=(mutable, field))
def mutable_fields(
    cls: type[_T] | None = None, /, *, key: str | None = None
) -> type[_T] | Callable[[type[_T]], type[_T]]:
    """Make a class a dataclass whose `mutable` attributes are fields of the prompt.

    Instances are told apart by identity. Setting an attribute that the class does not know raises
    `FieldError`, so that a mistyped name is not lost; setting a mutable one to a value without
    canonical text raises `ValueRenderError`, and the old value stays.

    Parameters
    ----------
    key
        What the keys of its fields begin with; by default the class name in snake case. Letters, digits
        and ``_ . : -``.

    Raises
    ------
    FieldError
        The class is a dataclass already, has slots or its own ``__eq__``, has no mutable attribute,
        or two of its fields share a key or a label; or `dataclasses.dataclass` refuses it.
    """
    if cls is None:
        return lambda decorated: _decorate(decorated, key)
    return _decorate(cls, key)


def field_specs(cls_or_instance: object) -> tuple[FieldSpec, ...]:
    """Return the fields of a `mutable_fields` class or instance, in declared order.

    Raises
    ------
    FieldError
        It is neither.
    """
    return _table(cls_or_instance).specs


def class_key(obj: object) -> str:
    """Return what the keys of a class's fields begin with, such as ``"support_order"``.

    Raises
    ------
    FieldError
        `obj` is neither a `mutable_fields` class nor an instance of one.
    """
    return _table(obj).key


def is_mutable_fields(obj: object) -> bool:
    """Tell whether `obj` is a `mutable_fields` class or an instance of one."""
    return hasattr(obj if isinstance(obj, type) else type(obj), _TABLE)


def read_fields(obj: object, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield key and current text of every field of `obj`, in declared order.

    Parameters
    ----------
    obj
        An instance of a `mutable_fields` class.
    prefix
        What the keys begin with: ``"order"`` gives ``"order.status"``.

    Raises
    ------
    FieldError
        `obj` is no such instance, or an attribute has no value.
    ValueRenderError
        A value was changed in place to one without canonical text.
    """
    if isinstance(obj, type):
        raise FieldError(f"{obj.__qualname__} is a class and has no current values; give an instance of it")
    for spec in _table(obj).specs:
        try:
            value = getattr(obj, spec.attribute)
        except AttributeError:
            raise FieldError(f"{_place(obj, spec)} has no value; set it, to None if there is none") from None
        yield f"{prefix}.{spec.key}", _text(obj, spec, value)


def _decorate(cls: type[_T], key: str | None) -> type[_T]:
    name = cls.__qualname__
    if "__dataclass_fields__" in vars(cls):
        raise FieldError(f"{name} is a dataclass already; @mutable_fields makes it one: use it alone")
    if "__slots__" in vars(cls) or any(vars(base).get("__slots__") for base in cls.__mro__):
        raise FieldError(f"{name} has __slots__; remove them, since its fields live in the instance's dict")
    if "__eq__" in vars(cls):
        raise FieldError(f"{name} defines __eq__, but its instances are told apart by identity; remove it")
    try:
        made = dataclass(eq=False)(cls)
    except (TypeError, ValueError) as error:
        raise FieldError(f"{name} cannot be made a dataclass: {error}") from error
    attributes = fields(cast("Any", made))
    specs = tuple(
        _spec(one.name, one.metadata[_DECLARATION]) for one in attributes if _DECLARATION in one.metadata
    )
    if not specs:
        raise FieldError(f"{name} has no mutable field; declare one, such as: status: str = mutable()")
    for what, texts in (("key", [spec.key for spec in specs]), ("label", [spec.label for spec in specs])):
        twice = sorted({text for text in texts if texts.count(text) > 1})
        if twice:
            raise FieldError(f"{name} has two fields with the {what} {twice[0]!r}; give each its own {what}")
    inherited = any(_TABLE in vars(base) for base in cls.__mro__)
    class_key = key if key is not None else _WORD_START.sub("_", cls.__name__.strip("_")).lower()
    if not _CLASS_KEY.fullmatch(class_key):
        raise FieldError(
            f"{name}: class key {class_key!r} is malformed; give one of letters, digits and _ . : -"
        )
    table = _Table(
        key=class_key,
        specs=specs,
        by_attribute={spec.attribute: spec for spec in specs},
        attributes=frozenset(one.name for one in attributes),
    )
    setattr(made, _TABLE, table)
    _install(made, inherited=inherited)
    return made


def _spec(attribute: str, told: _Declaration) -> FieldSpec:
    key = told.key if told.key is not None else attribute
    if not _KEY.fullmatch(key):
        raise FieldError(
            f"attribute {attribute!r}: key {key!r} is malformed; give one of letters, digits and _ : -"
        )
    words = attribute.strip("_").replace("_", " ")
    return FieldSpec(
        attribute=attribute,
        key=key,
        label=told.label or words[:1].upper() + words[1:],
        unit=told.unit,
        granularity=told.granularity,
        sensitive=told.sensitive,
        critical=told.critical,
        depends_on=told.depends_on,
    )


def _install(cls: Any, *, inherited: bool) -> None:
    """Give the class its checks; a class derived from a decorated one has them already."""
    if cls.__eq__ is not object.__eq__:  # a dataclass among its bases compares by value
        cls.__eq__ = object.__eq__
        cls.__hash__ = object.__hash__
    if inherited:
        return
    assign = cls.__setattr__

    def set_checked(self: object, name: str, value: object) -> None:
        table = _table(self)
        spec = table.by_attribute.get(name)
        if spec is not None:
            _text(self, spec, value)
        elif name not in table.attributes and not hasattr(type(self), name) and not _DUNDER.fullmatch(name):
            known = ", ".join(sorted(table.attributes))
            raise FieldError(
                f"{type(self).__qualname__} has no attribute {name!r}, only {known}; correct or declare it"
            )
        assign(self, name, value)

    def state(self: object) -> dict[str, Any]:
        # Texts are not stored: another release may render the same value differently.
        return {name: value for name, value in vars(self).items() if name != _TEXTS}

    cls.__setattr__ = set_checked
    if cls.__getstate__ is object.__getstate__:
        cls.__getstate__ = state


def _text(obj: object, spec: FieldSpec, value: object) -> str:
    """Render a value of a field; a scalar that was rendered last time is not rendered again."""
    texts: dict[str, tuple[object, str]] = vars(obj).setdefault(_TEXTS, {})
    kept = texts.get(spec.attribute)
    if kept is not None and kept[0] is value:
        return kept[1]
    try:
        text = canonical(value, granularity=spec.granularity)
    except ValueRenderError as error:
        raise ValueRenderError(f"{_place(obj, spec)}: {error}") from None
    text = with_unit(text, spec.unit)
    if type(value) in _IMMUTABLE:
        texts[spec.attribute] = (value, text)
    return text


def _place(obj: object, spec: FieldSpec) -> str:
    return f"{type(obj).__qualname__}.{spec.attribute}"


def _table(obj: object) -> _Table:
    cls = obj if isinstance(obj, type) else type(obj)
    table = getattr(cls, _TABLE, None)
    if not isinstance(table, _Table):
        raise FieldError(f"{cls.__qualname__} declares no fields; decorate the class with @mutable_fields")
    return table
