"""The bot: a policy, a skill and an order's row, bound to a context."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from agentkv import AgentKVContext, Inline, Mode, Policy, SamplingOptions, Skill, mutable, mutable_fields
from agentkv.backends.base import Backend
from agentkv.segments import Splicing
from examples.support_desk.database import LABELS, OrderRow, fetch_order
from examples.support_desk.policy import POLICY, RETURNS

ANSWER_TOKENS = 40


@mutable_fields(key="order")
class Order:
    """What the bot sees of an order."""

    id: str = mutable(label=LABELS["order.id"])
    status: str = mutable(label=LABELS["order.status"])
    eta: str = mutable(label=LABELS["order.eta"])
    address: str = mutable(label=LABELS["order.address"])
    carrier: str = mutable(label=LABELS["order.carrier"])


@mutable_fields(key="customer")
class Customer:
    """What the bot sees of the customer who placed it."""

    name: str = mutable(label=LABELS["customer.name"])
    tier: str = mutable(label=LABELS["customer.tier"])
    refund_limit: str = mutable(label=LABELS["customer.refund_limit"])


class SupportDesk:
    """One open case: the order's row is read before every turn, and the context says what changed.

    Parameters
    ----------
    backend
        Runs the model.
    connection
        The shop's database.
    order_id
        The order that the case is about.
    skills
        What the bot knows from the first turn on; others can be added to its context.
    splicing
        Whether compiled skills are spliced, if the backend can.
    """

    def __init__(
        self,
        backend: Backend,
        connection: sqlite3.Connection,
        order_id: str,
        mode: Mode = Mode.ON,
        *,
        skills: Sequence[Skill] = (Skill("returns", RETURNS),),
        splicing: Splicing = Splicing.NEVER,
    ) -> None:
        self._connection = connection
        self._order_id = order_id
        row = fetch_order(connection, order_id)
        self._order = Order(row.id, row.status, row.eta, row.address, row.carrier)
        self._customer = Customer(row.customer_name, row.tier, row.refund_limit)
        self.context = AgentKVContext(
            backend,
            segments=[Policy(Inline(POLICY)), *skills, self._order, self._customer],
            mode=mode,
            sampling=SamplingOptions(max_tokens=ANSWER_TOKENS),
            splicing=splicing,
        )

    def refresh(self) -> OrderRow:
        """Read the order's row into the bound objects."""
        row = fetch_order(self._connection, self._order_id)
        self._order.status, self._order.eta = row.status, row.eta
        self._order.address, self._order.carrier = row.address, row.carrier
        self._customer.tier, self._customer.refund_limit = row.tier, row.refund_limit
        return row
