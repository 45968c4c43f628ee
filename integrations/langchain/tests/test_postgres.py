"""Conversations on Postgres, where ``AGENTKV_TEST_POSTGRES`` names a database that may be written to.

Needs ``langgraph-checkpoint-postgres`` and ``psycopg[binary]``. It makes LangGraph's own tables, and threads
and namespaces with names of their own::

    export AGENTKV_TEST_POSTGRES=postgresql://user:password@127.0.0.1:5432/test
    python -m pytest tests/test_postgres.py
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from agents import Desk, Order, report
from langchain_agentkv import GraphLedgerStore, wrap
from scripted import Scripted, append_only, calling, extends, updates_in

pytestmark = pytest.mark.optional("needs a Postgres server: AGENTKV_TEST_POSTGRES")


@pytest.fixture
def database() -> str:
    """The database's address."""
    address = os.environ.get("AGENTKV_TEST_POSTGRES", "")
    if not address:
        pytest.skip("AGENTKV_TEST_POSTGRES names no database: set it to postgresql://user:password@host/name")
    return address


@pytest.fixture
def thread() -> str:
    """A thread that no other test has."""
    return secrets.token_hex(8)


@pytest.fixture
def saver(database: str) -> Iterator[Any]:
    """A checkpointer on it."""
    from langgraph.checkpoint.postgres import PostgresSaver

    with PostgresSaver.from_conn_string(database) as made:
        made.setup()
        yield made


def test_another_process_goes_on_byte_for_byte(saver: Any, database: str, thread: str):
    """A second agent over a connection of its own sends what the first one would have sent."""
    from langgraph.checkpoint.postgres import PostgresSaver

    first = Desk(["Hello.", "Lost."], checkpointer=saver)
    first.ask("Hello", thread)
    first.order.status = "lost"
    first.ask("And?", thread)
    with PostgresSaver.from_conn_string(database) as other:
        second = Desk(["Yes."], checkpointer=other)
        second.order.status = "lost"
        result = second.ask("Well?", thread)
    assert report(result)["reason"] == ""
    assert extends(first.calls[1], second.calls[0])
    assert len(updates_in(second.calls[0])) == 1


def test_a_long_conversation_with_tools_stays_append_only(saver: Any, thread: str):
    """Rounds of tools and changes over more calls than lie between two whole records."""
    desk = Desk([calling(("lookup", {"number": "7"})), "Known."], checkpointer=saver)
    for turn in range(12):
        if turn % 2:
            desk.order.status = f"step {turn}"
        desk.ask(f"Question {turn}?", thread)
    assert len(desk.calls) == 24
    assert all(append_only(desk.calls))


def test_a_fork_goes_on_from_where_it_left(saver: Any, thread: str):
    """Two branches of one checkpoint begin with its prompt."""
    desk = Desk(["Hello.", "A.", "B."], checkpointer=saver)
    desk.ask("Hello", thread)
    fork = desk.agent.get_state(desk.config(thread)).config
    desk.order.status = "lost"
    desk.ask("And?", thread)
    desk.order.status = "found"
    desk.agent.invoke({"messages": [("user", "Or?")]}, fork)
    assert extends(desk.calls[0], desk.calls[1])
    assert extends(desk.calls[0], desk.calls[2])


async def test_an_asynchronous_agent(database: str, thread: str):
    """The asynchronous checkpointer."""
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

    async with AsyncPostgresSaver.from_conn_string(database) as made:
        await made.setup()
        desk = Desk(["Hello.", "Lost."], checkpointer=made)
        await desk.aask("Hello", thread)
        desk.order.status = "lost"
        await desk.aask("And?", thread)
    assert append_only(desk.calls) == [True]
    assert len(updates_in(desk.calls[1])) == 1


def test_a_wrapped_model_keeps_its_ledgers_in_a_store(database: str, thread: str):
    """`GraphLedgerStore` over LangGraph's store on Postgres."""
    from langgraph.store.postgres import PostgresStore

    order, inner = Order(), Scripted()
    config: Any = {"configurable": {"thread_id": thread}}
    with PostgresStore.from_conn_string(database) as store:
        store.setup()
        model = wrap(inner, [order], ledger_store=GraphLedgerStore(store, ("agentkv-test", thread)))
        messages: list[Any] = [("user", "Hello")]
        messages += [model.invoke(messages, config), ("user", "And?")]
        order.status = "lost"
        model.invoke(messages, config)
    assert append_only(inner.calls) == [True]
    assert len(updates_in(inner.calls[1])) == 1
