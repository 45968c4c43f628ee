"""The shop's orders and customers in a SQLite file, the one place where the truth of a case lives.

Values are always bound as parameters. A column's name cannot be bound, so it comes from a closed
enumeration and never from a caller's text.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

SCHEMA: Final = """
CREATE TABLE customers (
    id           TEXT PRIMARY KEY,
    name         TEXT NOT NULL,
    tier         TEXT NOT NULL,
    refund_limit TEXT NOT NULL
) STRICT;
CREATE TABLE orders (
    id          TEXT PRIMARY KEY,
    customer_id TEXT NOT NULL REFERENCES customers (id),
    status      TEXT NOT NULL,
    eta         TEXT NOT NULL,
    address     TEXT NOT NULL,
    carrier     TEXT NOT NULL
) STRICT;
"""

CUSTOMERS: Final = (
    ("C-310", "Mara Ellison", "silver", "80 euros"),
    ("C-447", "Tomas Reyk", "bronze", "40 euros"),
)
ORDERS: Final = (
    ("LO-48213", "C-310", "in transit", "Tuesday 4 March", "14 Quarry Lane, Hexford", "Northwind Parcel"),
    ("LO-50977", "C-447", "being packed", "Monday 10 March", "3 Mill Row, Aldwick", "Harrow Couriers"),
)

ORDER_ID: Final = "LO-48213"
"""The order of the scripted conversation."""

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "order.id": "Order number",
        "order.status": "Order status",
        "order.eta": "Estimated delivery",
        "order.address": "Delivery address",
        "order.carrier": "Carrier",
        "customer.name": "Customer name",
        "customer.tier": "Customer tier",
        "customer.refund_limit": "Refund limit",
    }
)
"""Key of every field that the policy shows, and how the policy calls it."""


class Column(StrEnum):
    """A column that may change while a case is open, named as the field that shows it."""

    STATUS = "order.status"
    ETA = "order.eta"
    ADDRESS = "order.address"
    CARRIER = "order.carrier"
    TIER = "customer.tier"
    REFUND_LIMIT = "customer.refund_limit"


_UPDATES: Final[Mapping[Column, str]] = MappingProxyType(
    {
        Column.STATUS: "UPDATE orders SET status = ? WHERE id = ?",
        Column.ETA: "UPDATE orders SET eta = ? WHERE id = ?",
        Column.ADDRESS: "UPDATE orders SET address = ? WHERE id = ?",
        Column.CARRIER: "UPDATE orders SET carrier = ? WHERE id = ?",
        Column.TIER: """
            UPDATE customers SET tier = ? WHERE id = (SELECT customer_id FROM orders WHERE id = ?)""",
        Column.REFUND_LIMIT: """
            UPDATE customers SET refund_limit = ? WHERE id = (SELECT customer_id FROM orders WHERE id = ?)""",
    }
)


class OrderNotFoundError(LookupError):
    """The database has no order of the given number."""


@dataclass(frozen=True, slots=True)
class OrderRow:
    """One order, and what the case shows of the customer who placed it."""

    id: str
    status: str
    eta: str
    address: str
    carrier: str
    customer_name: str
    tier: str
    refund_limit: str

    def fields(self) -> dict[str, str]:
        """Return the value of every field of the case by its key, in the order of `LABELS`."""
        return {
            "order.id": self.id,
            "order.status": self.status,
            "order.eta": self.eta,
            "order.address": self.address,
            "order.carrier": self.carrier,
            "customer.name": self.customer_name,
            "customer.tier": self.tier,
            "customer.refund_limit": self.refund_limit,
        }


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database file at `path`, and create it with its first rows when it does not exist yet."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys = ON")
    if (
        connection.execute("SELECT count(*) FROM sqlite_master WHERE name = ?", ("orders",)).fetchone()[0]
        == 0
    ):
        _create(connection)
    return connection


def reset_database(connection: sqlite3.Connection) -> None:
    """Put the first rows back, whatever was changed since."""
    with connection:
        connection.execute("DELETE FROM orders")
        connection.execute("DELETE FROM customers")
        _seed(connection)


def fetch_order(connection: sqlite3.Connection, order_id: str) -> OrderRow:
    """Read one order with its customer.

    Raises
    ------
    OrderNotFoundError
        There is no such order.
    """
    row = connection.execute(
        """
        SELECT o.id, o.status, o.eta, o.address, o.carrier, c.name, c.tier, c.refund_limit
        FROM orders AS o JOIN customers AS c ON c.id = o.customer_id
        WHERE o.id = ?
        """,
        (order_id,),
    ).fetchone()
    if row is None:
        raise OrderNotFoundError(f"no order {order_id!r} in the database; check the order number")
    return OrderRow(*row)


def update_order(connection: sqlite3.Connection, order_id: str, column: Column, value: str) -> None:
    """Change one column of an order, or of the customer who placed it, and commit.

    Raises
    ------
    OrderNotFoundError
        There is no such order; nothing was changed.
    """
    with connection:
        changed = connection.execute(_UPDATES[column], (value, order_id)).rowcount
    if changed == 0:
        raise OrderNotFoundError(f"no order {order_id!r} in the database; check the order number")


def _create(connection: sqlite3.Connection) -> None:
    connection.executescript(SCHEMA)
    with connection:
        _seed(connection)


def _seed(connection: sqlite3.Connection) -> None:
    connection.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", CUSTOMERS)
    connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", ORDERS)
