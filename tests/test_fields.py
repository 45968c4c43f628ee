"""Declared fields are checked when they are set and are read as they are now."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, replace
from datetime import date, time
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from agentkv import fields as module
from agentkv.errors import FieldError, ValueRenderError
from agentkv.fields import (
    FieldSpec,
    class_key,
    field_specs,
    is_mutable_fields,
    mutable,
    mutable_fields,
    read_fields,
)
from agentkv.values import Granularity


@mutable_fields
class SupportOrder:
    total: ClassVar[int] = 0

    status: str = mutable(label="Order status")
    eta_day: date | None = mutable(default=None, granularity=Granularity.DAY)
    items: list[Any] = mutable(default_factory=list, critical=True, depends_on=("status",))
    age: int | None = mutable(unit="days", default=3, key="age-of-order", sensitive=True)
    warehouse: Any = "north"
    notes: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"in the {self.warehouse}"

    @place.setter
    def place(self, value: str) -> None:
        self.warehouse = value


@mutable_fields(key="order")
class ExpressOrder(SupportOrder):
    courier: str = mutable(default="by bike")


class PlainOrder(SupportOrder):
    """Not decorated itself."""


@pytest.fixture
def order() -> SupportOrder:
    return SupportOrder(status="in transit")


def test_specs_hold_what_was_declared() -> None:
    """Labels and keys are made from the attribute where none is given."""
    assert field_specs(SupportOrder) == (
        FieldSpec("status", "status", "Order status"),
        FieldSpec("eta_day", "eta_day", "Eta day", granularity=Granularity.DAY),
        FieldSpec("items", "items", "Items", critical=True, depends_on=("status",)),
        FieldSpec("age", "age-of-order", "Age", unit="days", sensitive=True),
    )


def test_specs_of_an_instance_are_those_of_its_class(order: SupportOrder) -> None:
    """Class and instance can both be asked."""
    assert field_specs(order) is field_specs(SupportOrder)


@pytest.mark.parametrize(
    ("name", "key"),
    [("SupportOrder", "support_order"), ("HTTPOrder", "http_order"), ("Order2Go", "order2_go"), ("_A", "a")],
)
def test_class_key_is_the_name_in_snake_case(name: str, key: str) -> None:
    """The first part of the fields' keys comes from the class."""
    made: Any = mutable_fields(type(name, (), {"__annotations__": {"x": int}, "x": mutable(default=0)}))
    assert class_key(made) == key
    assert class_key(made()) == key


def test_values_are_read_with_prefix_and_unit(order: SupportOrder) -> None:
    """All fields come in declared order; ordinary attributes do not come."""
    assert list(read_fields(order, "order")) == [
        ("order.status", "in transit"),
        ("order.eta_day", "none"),
        ("order.items", "[]"),
        ("order.age-of-order", "3 days"),
    ]


def test_no_value_has_no_unit(order: SupportOrder) -> None:
    """``none days`` would be no sentence."""
    order.age = None
    assert dict(read_fields(order, "o"))["o.age-of-order"] == "none"


def test_change_is_read(order: SupportOrder) -> None:
    """Setting a value, or changing a container in place, shows at the next read."""
    list(read_fields(order, "o"))
    order.status = "delivered"
    order.items.append({"sku": 1})
    texts = dict(read_fields(order, "o"))
    assert texts["o.status"] == "delivered"
    assert texts["o.items"] == '[{"sku":1}]'


def test_equal_value_of_another_type_is_read_anew(order: SupportOrder) -> None:
    """1 and True are equal, yet their texts differ."""
    order.age = 1
    order.age = True
    assert dict(read_fields(order, "o"))["o.age-of-order"] == "yes days"


def test_scalar_is_rendered_once_and_a_container_at_each_read(
    order: SupportOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an unchanged order renders only what can change in place."""
    rendered: list[object] = []

    def spy(value: object, **options: Any) -> str:
        rendered.append(value)
        return "text"

    monkeypatch.setattr(module, "canonical", spy)
    list(read_fields(order, "o"))
    list(read_fields(order, "o"))
    assert rendered == [[], []]


def test_refused_value_leaves_the_old_one(order: SupportOrder) -> None:
    """A value without text raises where it is set, naming the attribute and the place inside."""
    with pytest.raises(ValueRenderError, match=r"SupportOrder\.status: value\[0\] is a builtins\.object"):
        order.status = [object()]  # type: ignore[assignment]
    assert order.status == "in transit"
    assert dict(read_fields(order, "o"))["o.status"] == "in transit"


def test_refused_value_stops_the_constructor() -> None:
    """An instance never starts with a value that cannot be shown."""
    with pytest.raises(ValueRenderError, match=r"SupportOrder\.status"):
        SupportOrder(status=b"raw")  # type: ignore[arg-type]


def test_value_spoilt_in_place_is_refused_when_read(order: SupportOrder) -> None:
    """What happens inside a container is seen at the next read only."""
    order.items.append(object())
    with pytest.raises(ValueRenderError, match=r"SupportOrder\.items: value\[0\]"):
        list(read_fields(order, "o"))


def test_time_that_its_granularity_cuts_away_is_refused(order: SupportOrder) -> None:
    """The declared granularity counts when a value is set."""
    with pytest.raises(ValueRenderError, match="granularity"):
        order.eta_day = time(12)  # type: ignore[assignment]


def test_mistyped_attribute_is_refused(order: SupportOrder) -> None:
    """The message lists the attributes that exist."""
    with pytest.raises(FieldError, match=r"'statsu', only age, eta_day, items, notes, status, warehouse"):
        order.statsu = "lost"  # type: ignore[attr-defined]


def test_ordinary_attribute_takes_any_value(order: SupportOrder) -> None:
    """Only fields are rendered; properties and class attributes can be set as ever."""
    order.warehouse = object()
    order.place = "south"
    order.total = 5  # type: ignore[misc]
    assert order.warehouse == "south"
    assert order.place == "in the south"
    assert order.total == 5


def test_own_setattr_is_kept() -> None:
    """A class that changes values as they are set shows what it has stored."""

    @mutable_fields
    class Loud:
        word: str = mutable()

        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, str(value).upper())

    loud = Loud(word="hey")
    assert dict(read_fields(loud, "l")) == {"l.word": "HEY"}
    with pytest.raises(ValueRenderError):
        loud.word = b""  # type: ignore[assignment]


def test_decorated_subclass_adds_fields() -> None:
    """Inherited fields come first, and the key is its own."""
    express = ExpressOrder(status="new")
    assert class_key(express) == "order"
    assert [spec.key for spec in field_specs(express)][-1] == "courier"
    express.courier = "by car"
    assert dict(read_fields(express, "x"))["x.courier"] == "by car"
    with pytest.raises(FieldError, match="courier"):
        express.curier = ""  # type: ignore[attr-defined]


def test_undecorated_subclass_keeps_the_fields() -> None:
    """It is its base as far as fields go."""
    plain = PlainOrder(status="new")
    assert class_key(plain) == "support_order"
    assert field_specs(plain) is field_specs(SupportOrder)


def test_instances_are_told_apart_by_identity() -> None:
    """Two orders of equal values are two orders, also where a base compares by value."""

    @dataclass
    class Base:
        number: int = 0

    @mutable_fields
    class Derived(Base):
        status: str = mutable(default="new")

    one, other = Derived(), Derived()
    assert len({one, other, SupportOrder("a"), SupportOrder("a")}) == 4


def test_generic_class_can_be_made() -> None:
    """Python sets names of its own on an instance of a parametrised class."""
    item = TypeVar("item")

    @mutable_fields
    class Holder(Generic[item]):
        held: item = mutable()

    assert dict(read_fields(Holder[int](held=3), "h")) == {"h.held": "3"}


def test_sensitive_value_is_not_in_the_repr(order: SupportOrder) -> None:
    """Logs of the object do not hold it."""
    assert "age" not in repr(order)
    assert "in transit" in repr(order)


@pytest.mark.parametrize(
    "make",
    [copy.copy, copy.deepcopy, replace, lambda order: pickle.loads(pickle.dumps(order))],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_copy_is_independent(order: SupportOrder, make: Any) -> None:
    """A copy reads the same, is checked too, and its changes stay its own."""
    list(read_fields(order, "o"))
    other = make(order)
    assert list(read_fields(other, "o")) == list(read_fields(order, "o"))
    other.status = "lost"
    assert dict(read_fields(order, "o"))["o.status"] == "in transit"
    with pytest.raises(FieldError):
        other.statsu = "lost"


def test_pickle_holds_no_texts(order: SupportOrder) -> None:
    """Another release may render a value differently, so only values travel."""
    assert order.__getstate__() == {
        "status": "in transit",
        "eta_day": None,
        "items": [],
        "age": 3,
        "warehouse": "north",
        "notes": [],
    }


@pytest.mark.parametrize(
    ("value", "declared"),
    [(SupportOrder, True), (SupportOrder("a"), True), (PlainOrder, True), (int, False), ("order", False)],
)
def test_declared_classes_are_told_from_others(value: object, declared: bool) -> None:
    """Classes and instances of declared fields are known."""
    assert is_mutable_fields(value) is declared


@pytest.mark.parametrize("ask", [field_specs, class_key, lambda value: list(read_fields(value, "x"))])
def test_other_object_has_no_fields(ask: Any) -> None:
    """The message says what to decorate."""
    with pytest.raises(FieldError, match="str declares no fields; decorate"):
        ask("order")


def test_class_has_no_values() -> None:
    """A class given in place of its instance is named."""
    with pytest.raises(FieldError, match="SupportOrder is a class"):
        list(read_fields(SupportOrder, "o"))


def test_deleted_attribute_is_named(order: SupportOrder) -> None:
    """A field without value cannot be read."""
    del order.status
    with pytest.raises(FieldError, match=r"SupportOrder\.status has no value"):
        list(read_fields(order, "o"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"label": ""}, "label ''"),
        ({"label": "two\nlines"}, "label"),
        ({"unit": " days"}, "unit ' days'"),
        ({"granularity": "day"}, "Granularity"),
        ({"depends_on": "status"}, "tuple"),
        ({"depends_on": ("",)}, "tuple"),
        ({"default": 1, "default_factory": int}, "one of them"),
    ],
)
def test_malformed_option_is_refused(options: dict[str, Any], why: str) -> None:
    """The message names the option and its value."""
    with pytest.raises(FieldError, match=why):
        mutable(**options)


@dataclass
class Already:
    status: str = mutable(default="")


@dataclass(frozen=True)
class Frozen:
    number: int = 0


class Slotted:
    __slots__ = ("other",)


def _class(*bases: type, **attributes: Any) -> type:
    annotations = {name: Any for name in attributes if not name.startswith("__")}
    return type("Made", bases, {"__annotations__": annotations, **attributes})


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Already, "Already is a dataclass already"),
        (SupportOrder, "is a dataclass already"),
        (_class(status="x"), "Made has no mutable field"),
        (_class(Slotted, status=mutable()), "__slots__"),
        (_class(__slots__=()), "__slots__"),
        (_class(status=mutable(), __eq__=lambda *_: True), "__eq__"),
        (_class(Frozen, status=mutable(default="")), "cannot be made a dataclass"),
        (_class(status=mutable(default=[])), "mutable default"),
        (_class(a=mutable(default=1), b=mutable()), "non-default argument"),
        (type("Bare", (), {"status": mutable()}), "no type annotation"),
        (_class(a=mutable(key="x"), b=mutable(key="x")), "two fields with the key 'x'"),
        (_class(a=mutable(label="L"), b=mutable(label="L")), "two fields with the label 'L'"),
        (_class(a=mutable(key="a.b")), "key 'a.b'"),
        (_class(größe=mutable()), "key 'größe'"),
        (type("Größe", (), {"__annotations__": {"a": int}, "a": mutable()}), "class key 'größe'"),
    ],
)
def test_class_that_cannot_have_fields_is_refused(cls: type, why: str) -> None:
    """The message names the class and what to change."""
    with pytest.raises(FieldError, match=why):
        mutable_fields(cls)


def test_malformed_class_key_is_refused() -> None:
    """A key has no spaces."""
    with pytest.raises(FieldError, match="class key 'my order'"):
        mutable_fields(key="my order")(_class(a=mutable()))
