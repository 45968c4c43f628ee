"""The support desk's scripted conversation on the small model, and the arms it is compared with."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentkv import Inline, Policy, Reply, SamplingOptions
from agentkv.backends.base import Backend
from agentkv.testing import ScriptedBackend
from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, ELSEWHERE, HOIST, REWRITE, Case, make_arm
from examples.support_desk.__main__ import app
from examples.support_desk.bot import SupportDesk
from examples.support_desk.chat import chat
from examples.support_desk.compare import compare
from examples.support_desk.database import ORDER_ID, Column, open_database, update_order
from examples.support_desk.script import SCRIPT, reports

LABELS = {"status": "Order status", "tier": "Customer tier"}
FIRST = {"status": "in transit", "tier": "silver"}
SECOND = {"status": "delivered", "tier": "silver"}
CASE = Case(
    segments=(Policy(Inline("The order is {status}, the customer {tier}. " + "Be brief. " * 40)),),
    labels=LABELS,
    first_values=FIRST,
    sampling=SamplingOptions(max_tokens=16),
)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A new database file."""
    opened = open_database(tmp_path / "desk.sqlite")
    yield opened
    opened.close()


def run_script(backend: Backend, connection: sqlite3.Connection) -> list[Reply]:
    """Run the twelve turns."""
    desk = SupportDesk(backend, connection, ORDER_ID)
    replies = []
    with desk.context as context:
        for step in SCRIPT:
            for update in step.updates:
                update_order(connection, ORDER_ID, update.column, update.value)
            desk.refresh()
            replies.append(context.ask(step.question))
    return replies


@pytest.fixture(scope="module")
def replies(small_backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> list[Reply]:
    """The replies of the small model."""
    opened = open_database(tmp_path_factory.mktemp("desk") / "desk.sqlite")
    try:
        return run_script(small_backend, opened)
    finally:
        opened.close()


def test_every_turn_caches_what_was_predicted(replies: list[Reply]) -> None:
    """Observed where tokens enter the model, predicted before: equal on all twelve turns."""
    assert [r.report.cached_tokens for r in replies] == [r.report.predicted_cached_tokens for r in replies]


def test_nearly_the_whole_prompt_comes_from_the_cache(replies: list[Reply]) -> None:
    """At least 95 % of the prompt tokens of turns 2 to 12."""
    later = [reply.report for reply in replies[1:]]
    assert sum(r.cached_tokens for r in later) >= 0.95 * sum(r.prompt_tokens for r in later)


def test_the_small_model_reports_new_values_and_no_old_one(replies: list[Reply]) -> None:
    """All changed turns but at most one report the new value; none reports the old one."""
    judged = [(r.text, step.probe) for r, step in zip(replies, SCRIPT, strict=True) if step.probe]
    assert len(judged) >= 6
    assert sum(reports(text, probe.new_value) for text, probe in judged) >= len(judged) - 1
    assert not any(reports(text, probe.old_value) for text, probe in judged)


def test_only_what_the_bot_was_told_wrongly_is_said() -> None:
    """Each changed turn says its one field; the value that came back before it was told says nothing."""
    backend = ScriptedBackend(["Fine."])
    connection = open_database(Path(":memory:"))
    said = [reply.report.erratum for reply in run_script(backend, connection)]
    connection.close()
    for step, erratum in zip(SCRIPT, said, strict=True):
        if step.probe is not None:
            assert f"is no longer {step.probe.old_value}" in erratum
            assert f"is now {step.probe.new_value}." in erratum
        elif step.updates:
            assert erratum == ""
    assert any(step.updates and step.probe is None for step in SCRIPT)


def test_the_comparison_has_a_row_for_each_turn_and_sums_over_the_later_ones(
    connection: sqlite3.Connection,
) -> None:
    """Everything that is summed can be computed again from the rows."""
    result = compare(
        ScriptedBackend(["It is now delivered."], prefill_s=0.001), connection, Console(quiet=True)
    )
    turns, summary = result["turns"], result["summary"]
    assert [row["turn"] for row in turns] == list(range(1, 13))
    assert summary["changed_turns"] == sum(step.probe is not None for step in SCRIPT)
    later = turns[1:]
    assert summary["new_tokens"] == sum(row["new_tokens"] for row in later)
    assert summary["cached_share"] == sum(r["cached_tokens"] for r in later) / sum(
        r["prompt_tokens"] for r in later
    )
    assert summary["new_values_reported"] == 1
    assert summary["cumulative_ttft_ratio"] > 6
    assert all(row["new_tokens"] < row["append_state_new_tokens"] for row in later)
    assert all(row["rewrite_computed_tokens"] > row["computed_tokens"] for row in later if row["field"])


def test_rewriting_loses_the_prefix_and_the_others_keep_it() -> None:
    """After a change near the top, only the rewritten prompt shares nothing but its first tokens."""
    shared = {}
    for name in ARMS:
        backend = ScriptedBackend(["Yes."])
        arm = make_arm(name, backend, CASE, run="a")
        arm.turn(FIRST, "Where is it?")
        turn = arm.turn(SECOND, "And now?")
        shared[name] = turn.cached_tokens / turn.prompt_tokens
        arm.close()
    assert shared[REWRITE] < 0.5
    assert min(shared[AGENTKV], shared[APPEND_STATE], shared[HOIST]) > 0.5


def test_state_arms_show_the_state_where_they_say() -> None:
    """Appended state is kept in later prompts, hoisted state is stripped; the policy shows no value."""
    for name, count in ((APPEND_STATE, 2), (HOIST, 1)):
        backend = ScriptedBackend(["Yes."])
        arm = make_arm(name, backend, CASE, run="a")
        arm.turn(FIRST, "Where is it?")
        arm.turn(SECOND, "And now?")
        last = backend.prompts[-1]
        assert last.count("Current state:") == count
        assert "Order status: delivered" in last
        assert f"The order is {ELSEWHERE}" in last


def test_chat_tells_the_bot_what_was_set(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row changed between messages is said with the next one; a wrong column is answered with the names."""
    backend = ScriptedBackend(["Hello."])
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    lines = iter(
        ["Hi", "/set order.status lost", "/set nothing x", "/row", "/report", "Where is it?", "/quit"]
    )
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    chat(SupportDesk(backend, connection, ORDER_ID), connection, ORDER_ID, console)
    console.file.close()
    shown = console.export_text()
    assert "The Order status is now lost." in backend.prompts[-1]
    assert str(Column.STATUS) in shown
    assert "2 turns" not in shown
    assert "1 turns" in shown


def test_help_and_an_unknown_model_are_clear() -> None:
    """``--help`` names the options; a model that is not there is one line that says what to do."""
    runner = CliRunner()
    assert "--interactive" in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    failed = runner.invoke(app, ["--model", "no-such-model"])
    assert failed.exit_code != 0
    assert "no-such-model" in str(failed.exception)
