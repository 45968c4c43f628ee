"""Checkpoints: what is written, resumed, forked and travelled back to."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from agentkv import Policy
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from agents import Desk, Order, report
from langchain_agentkv.engine import Engine
from langchain_agentkv.fields import Scope
from langchain_agentkv.planning import Asked
from langchain_agentkv.state import FrozenChannel, LogChannel
from scripted import append_only, calling, extends, updates_in, wire


def sqlite_saver(path: Path) -> SqliteSaver:
    """Return a checkpointer on a file."""
    return SqliteSaver(sqlite3.connect(path, check_same_thread=False))


def written(path: Path) -> int:
    """Return the bytes that checkpoints and their writes hold of agentkv's keys."""
    with sqlite3.connect(path) as connection:
        (own,) = connection.execute(
            "select sum(length(value)) from writes where channel like 'agentkv%'"
        ).fetchone()
        rows = connection.execute("select checkpoint from checkpoints").fetchall()

    def ext(_: int, data: bytes) -> bytes:
        return data

    total = int(own or 0)
    for (blob,) in rows:
        values = ormsgpack.unpackb(blob, ext_hook=ext)["channel_values"]
        total += sum(len(ormsgpack.packb(v)) for k, v in values.items() if k.startswith("agentkv"))
    return total


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_new_process_goes_on_byte_for_byte(kind: str, tmp_path: Path):
    """Another agent on the same checkpointer sends what the first would have sent."""
    saver = InMemorySaver() if kind == "memory" else sqlite_saver(tmp_path / "a.db")
    answers = ["Hello.", "Lost."]
    first = Desk(answers, checkpointer=saver)
    first.ask("Hello")
    first.order.status = "lost"
    first.ask("And?")
    again = Desk(["Yes."], checkpointer=saver)
    again.order.status = "lost"
    result = again.ask("Well?")
    first.ask("Well?", "other")
    assert report(result)["reason"] == ""
    assert extends(first.calls[1], again.calls[0])


def test_another_process_reads_what_one_wrote(tmp_path: Path):
    """The same through a file and a second interpreter."""
    path = tmp_path / "a.db"
    desk = Desk(["Hello.", "Lost."], checkpointer=sqlite_saver(path))
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    script = f"""
        import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        from pathlib import Path
        from agents import Desk, report
        from test_persistence import sqlite_saver
        from scripted import wire
        desk = Desk(["Yes."], checkpointer=sqlite_saver(Path({str(path)!r})))
        desk.order.status = "lost"
        assert report(desk.ask("Well?"))["reason"] == ""
        print([wire(m) for m in desk.calls[0].messages])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    sent = [wire(message) for message in desk.calls[-1].messages]
    assert run.stdout.startswith(str(sent)[:-1])


async def test_async_sqlite(tmp_path: Path):
    """The asynchronous checkpointer."""
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "a.db")) as saver:
        desk = Desk([calling(("lookup", {"number": "7"})), "Known.", "Lost."], checkpointer=saver)
        await desk.aask("Look 7 up")
        desk.order.status = "lost"
        await desk.aask("And?")
    assert append_only(desk.calls) == [True, True]
    assert len(updates_in(desk.calls[-1])) == 1


class Talk(TypedDict):
    """The ledger's channels alone, as the middleware declares them."""

    agentkv_frozen: FrozenChannel
    agentkv_log: LogChannel


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("changes", "turns"), [(True, 500), (False, 200)])
def test_a_step_writes_what_is_new(tmp_path: Path, changes: bool, turns: int):
    """Over hundreds of turns the bytes of a step do not grow, whether all or nothing changes."""
    order, messages, sizes = Order(), [], []
    engine = Engine([Policy("You answer for a shop."), order])

    def call(state: Any) -> dict[str, Any]:
        prepared = engine.prepare(Asked(tuple(messages)), state, Scope())
        answer = AIMessage("Fine.")
        messages.append(answer)
        return prepared.answered(answer, 0.0).update

    path = tmp_path / "a.db"
    graph = (
        StateGraph(Talk)
        .add_node("call", call)
        .add_edge(START, "call")
        .compile(checkpointer=sqlite_saver(path))
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    for turn in range(turns):
        if changes:
            order.status = f"step {turn}"
        messages.append(HumanMessage("And?"))
        graph.invoke({"agentkv_log": []}, config)
        if turn + 1 in (turns // 5, 2 * turns // 5, 4 * turns // 5, turns):
            sizes.append(written(path))
    early, late = (sizes[1] - sizes[0]) * 5 / turns, (sizes[3] - sizes[2]) * 5 / turns
    whole = len(ormsgpack.packb(graph.get_state(config).values))
    assert late < 1.3 * early
    assert late < whole


def test_a_fork_goes_on_from_where_it_left():
    """Two branches of one checkpoint begin with its prompt, and each says what changed."""
    desk = Desk(["Hello.", "A.", "B.", "C."])
    desk.ask("Hello")
    fork = desk.agent.get_state(desk.config()).config
    desk.order.status = "lost"
    desk.ask("And?")
    desk.order.status = "found"
    desk.agent.invoke({"messages": [("user", "Or?")]}, fork)
    assert extends(desk.calls[0], desk.calls[1])
    assert extends(desk.calls[0], desk.calls[2])
    assert updates_in(desk.calls[2]) == [
        "Update 1: the Order status is no longer in transit. The Order status is now found."
    ]


def test_time_travel_asks_the_same_again():
    """Regenerating from an earlier checkpoint sends what was sent then."""
    desk = Desk(["Hello.", "A.", "B."])
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    before = next(s for s in desk.agent.get_state_history(desk.config()) if s.next == ("model",))
    desk.agent.invoke(None, before.config)
    assert [wire(m) for m in desk.calls[2].messages] == [wire(m) for m in desk.calls[1].messages]


def test_a_long_conversation_stays_append_only():
    """Fields that change every other turn, over 60 turns with snapshots, in one epoch's prefix each."""
    desk = Desk()
    for turn in range(60):
        if turn % 2:
            desk.order.status = f"step {turn}"
        desk.ask(f"Question {turn}?")
    assert append_only(desk.calls).count(False) <= 1
    assert desk.calls[-1].messages[0].content == desk.calls[-2].messages[0].content


def test_the_frozen_part_is_written_once_an_epoch(tmp_path: Path):
    """Steps write the log alone."""
    path = tmp_path / "a.db"
    desk = Desk(checkpointer=sqlite_saver(path))
    for _ in range(5):
        desk.ask("And?")
    with sqlite3.connect(path) as connection:
        (count,) = connection.execute(
            "select count(*) from writes where channel = 'agentkv_frozen'"
        ).fetchone()
        (steps,) = connection.execute("select count(*) from writes where channel = 'agentkv_log'").fetchone()
    assert (count, steps) == (1, 5)
