"""A conversation of twelve turns, as data: what changes in the database before a turn, and what is asked.

It was fixed before any wording of errata was tried on it. Between two turns the database may change more
than once; what counts is what the bot was last told against what is true when the question comes.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from examples.support_desk.database import Column


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """One change of the open order's row, or of its customer's."""

    column: Column
    value: str


@dataclass(frozen=True, slots=True)
class Probe:
    """How a changed turn is judged: its question asks for the one field that changed."""

    field: str
    """Key of the field, such as ``"order.status"``."""
    new_value: str
    """What is true now; the answer must report it."""
    old_value: str
    """What the bot was told last; the answer must not report it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn."""

    updates: tuple[RowUpdate, ...]
    """Changes made before the question, in this order."""
    question: str
    probe: Probe | None = None
    """Set on turns before which something the bot was told stopped being true."""


SCRIPT: Final = (
    Step((), "What is the order status?"),
    # The first turn asked for the old value, and its answer stands in the conversation.
    Step(
        (RowUpdate(Column.STATUS, "held at customs"),),
        "What is the order status?",
        Probe("order.status", new_value="held at customs", old_value="in transit"),
    ),
    Step((), "Can I return boots that I tried on at home?"),
    Step(
        (RowUpdate(Column.ADDRESS, "9 Orchard Street, Penmoor"),),
        "What is the delivery address?",
        Probe("order.address", new_value="9 Orchard Street, Penmoor", old_value="14 Quarry Lane, Hexford"),
    ),
    # Back to the value that the policy was written with, after another was told: it must be said again.
    Step(
        (RowUpdate(Column.STATUS, "in transit"),),
        "What is the order status?",
        Probe("order.status", new_value="in transit", old_value="held at customs"),
    ),
    # There and back before anything was told: nothing is to be said.
    Step(
        (RowUpdate(Column.TIER, "gold"), RowUpdate(Column.TIER, "silver")),
        "What is the customer tier?",
    ),
    Step(
        (RowUpdate(Column.REFUND_LIMIT, "150 euros"),),
        "What is the refund limit?",
        Probe("customer.refund_limit", new_value="150 euros", old_value="80 euros"),
    ),
    Step(
        (RowUpdate(Column.ETA, "Friday 7 March"),),
        "What is the estimated delivery?",
        Probe("order.eta", new_value="Friday 7 March", old_value="Tuesday 4 March"),
    ),
    Step((), "Who decides about a refund above the limit?"),
    # The sixth turn asked for the old value.
    Step(
        (RowUpdate(Column.TIER, "gold"),),
        "What is the customer tier?",
        Probe("customer.tier", new_value="gold", old_value="silver"),
    ),
    Step(
        (RowUpdate(Column.CARRIER, "Harrow Couriers"),),
        "What is the carrier?",
        Probe("order.carrier", new_value="Harrow Couriers", old_value="Northwind Parcel"),
    ),
    Step(
        (RowUpdate(Column.STATUS, "delivered"),),
        "What is the order status?",
        Probe("order.status", new_value="delivered", old_value="in transit"),
    ),
)
"""Eight of the twelve turns come after a change; the status goes A, B, A, C."""


def reports(answer: str, value: str) -> bool:
    """Tell whether `answer` states `value` as whole words.

    Case, white space and punctuation do not count, so ``"It's in -- Transit!"`` reports
    ``"in transit"`` and ``"1150 euros"`` does not report ``"150 euros"``.
    """
    words = _normalised(value)
    return bool(words) and f" {words} " in f" {_normalised(answer)} "


def _normalised(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"[^\w\s]|_", " ", folded).split())
