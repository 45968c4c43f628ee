"""Field declarations as a user writes them; a strict type checker accepts this file."""

from __future__ import annotations

from dataclasses import field

from agentkv.fields import FieldSpec, class_key, field_specs, mutable, mutable_fields, read_fields
from agentkv.values import Granularity


@mutable_fields
class Order:
    """Decorated bare."""

    status: str = mutable(label="Order status")
    eta: str | None = mutable(label="Estimated delivery", default=None)
    items: list[str] = mutable(default_factory=list)
    warehouse: str = "north"
    notes: list[str] = field(default_factory=list)


@mutable_fields(key="ticket")
class SupportTicket:
    """Decorated with a key."""

    age: int = mutable(unit="hours", granularity=Granularity.HOUR, default=0)


order: Order = Order(status="in transit", items=["kettle"])
positional: Order = Order("in transit", "Monday")
ticket: SupportTicket = SupportTicket(age=3)
status: str = order.status
eta: str | None = order.eta
age: int = ticket.age
order.status = "delivered"
specs: tuple[FieldSpec, ...] = field_specs(Order)
key: str = class_key(ticket)
pairs: list[tuple[str, str]] = list(read_fields(order, "order"))

wrong_name = Order(statsu="lost")  # type: ignore[call-arg]
wrong_type = Order(status=3)  # type: ignore[arg-type]
missing = Order()  # type: ignore[call-arg]
