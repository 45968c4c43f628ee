"""The support desk's database, script and judge: what the example's numbers rest on."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.support_desk.database import (
    LABELS,
    ORDER_ID,
    Column,
    OrderNotFoundError,
    fetch_order,
    open_database,
    reset_database,
    update_order,
)
from examples.support_desk.policy import POLICY, RETURNS
from examples.support_desk.script import SCRIPT, reports


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database file goes."""
    return tmp_path / "desk.sqlite"


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    """A fresh database file, open."""
    opened = open_database(path)
    yield opened
    opened.close()


def test_an_update_is_in_the_file_for_the_next_connection(connection: sqlite3.Connection, path: Path) -> None:
    """A change is committed: another connection to the same file reads it."""
    update_order(connection, ORDER_ID, Column.STATUS, "lost")
    other = open_database(path)
    assert fetch_order(other, ORDER_ID).status == "lost"
    other.close()


@pytest.mark.parametrize("column", Column)
def test_an_update_changes_its_field_and_no_other(connection: sqlite3.Connection, column: Column) -> None:
    """Every column writes the field it is named after, and only that one."""
    before = fetch_order(connection, ORDER_ID).fields()
    update_order(connection, ORDER_ID, column, "something else")
    assert fetch_order(connection, ORDER_ID).fields() == before | {column.value: "something else"}


def test_an_update_leaves_other_orders_alone(connection: sqlite3.Connection) -> None:
    """Neither another order nor its customer changes."""
    before = fetch_order(connection, "LO-50977")
    for column in Column:
        update_order(connection, ORDER_ID, column, "something else")
    assert fetch_order(connection, "LO-50977") == before


def test_a_value_that_looks_like_sql_is_stored_as_text(connection: sqlite3.Connection) -> None:
    """A value is bound, never spliced into the statement."""
    forged = "x'; DROP TABLE orders; --"
    update_order(connection, ORDER_ID, Column.ADDRESS, forged)
    assert fetch_order(connection, ORDER_ID).address == forged


def test_reset_puts_the_first_rows_back(connection: sqlite3.Connection) -> None:
    """After a reset every field has its first value."""
    first = fetch_order(connection, ORDER_ID)
    update_order(connection, ORDER_ID, Column.TIER, "gold")
    update_order(connection, ORDER_ID, Column.STATUS, "lost")
    reset_database(connection)
    assert fetch_order(connection, ORDER_ID) == first


def test_opening_again_keeps_what_was_changed(connection: sqlite3.Connection, path: Path) -> None:
    """Opening an existing file does not seed it again."""
    update_order(connection, ORDER_ID, Column.TIER, "gold")
    connection.close()
    again = open_database(path)
    assert fetch_order(again, ORDER_ID).tier == "gold"
    again.close()


def test_an_unknown_order_is_refused_by_its_number(connection: sqlite3.Connection) -> None:
    """Reading and changing an order that is not there both name it."""
    with pytest.raises(OrderNotFoundError, match="LO-0"):
        fetch_order(connection, "LO-0")
    with pytest.raises(OrderNotFoundError, match="LO-0"):
        update_order(connection, "LO-0", Column.STATUS, "lost")


def test_the_policy_shows_exactly_the_fields_of_an_order(connection: sqlite3.Connection) -> None:
    """Every placeholder is a field, every field has one placeholder and one label."""
    shown = re.findall(r"(?<!\{)\{([a-z_.]+)\}(?!\})", POLICY)
    fields = fetch_order(connection, ORDER_ID).fields()
    assert len(shown) == len(set(shown))
    assert set(shown) == set(fields) == set(LABELS)
    assert all(f"{LABELS[key]}: {{{key}}}" in POLICY for key in shown)


def test_the_returns_skill_shows_no_field() -> None:
    """The skill is the same for every case, or it could not be compiled once."""
    assert "{" not in RETURNS


def test_the_script_probes_each_turn_on_which_what_was_told_became_wrong(
    connection: sqlite3.Connection,
) -> None:
    """Probes agree with the database: one changed field, its value before and after; none elsewhere."""
    told = fetch_order(connection, ORDER_ID).fields()
    for number, step in enumerate(SCRIPT, start=1):
        for update in step.updates:
            update_order(connection, ORDER_ID, update.column, update.value)
        true = fetch_order(connection, ORDER_ID).fields()
        changed = [(key, true[key], told[key]) for key in told if told[key] != true[key]]
        probe = step.probe
        expected = [] if probe is None else [(probe.field, probe.new_value, probe.old_value)]
        assert changed == expected, f"turn {number}"
        told = true


def test_the_script_covers_the_hard_cases() -> None:
    """Seven changed turns, a value that comes back after it was told, one that comes back untold."""
    probes = [step.probe for step in SCRIPT if step.probe is not None]
    assert len(SCRIPT) == 12
    assert len(probes) >= 7
    assert any(a.field == b.field and a.old_value == b.new_value for a in probes for b in probes)
    assert any(step.updates and step.probe is None for step in SCRIPT)


def test_each_probe_asks_for_its_field_and_its_values_are_told_apart() -> None:
    """The question names the label, and neither value reports the other."""
    for step in SCRIPT:
        if step.probe is None:
            continue
        assert step.question == f"What is the {LABELS[step.probe.field].lower()}?"
        assert not reports(step.probe.new_value, step.probe.old_value)
        assert not reports(step.probe.old_value, step.probe.new_value)
        assert not reports(step.question, step.probe.new_value)


@pytest.mark.parametrize(
    ("answer", "value", "expected"),
    [
        ("The order is In  Transit.", "in transit", True),
        ("It is held\nat customs!", "held at customs", True),
        ("9 Orchard Street\nPenmoor", "9 Orchard Street, Penmoor", True),
        ("The limit is 1150 euros.", "150 euros", False),
        ("It is undelivered.", "delivered", False),
        ("golden", "gold", False),
        ("Anything.", "...", False),
    ],
)
def test_reports_compares_whole_words(answer: str, value: str, expected: bool) -> None:
    """Case, white space and punctuation do not count; parts of words do not match."""
    assert reports(answer, value) is expected
