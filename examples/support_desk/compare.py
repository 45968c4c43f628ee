"""The scripted conversation, run three ways in one process, turn by turn."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentkv import Inline, Policy, SamplingOptions, Skill
from agentkv.backends.base import Backend
from agentkv.plan import describe
from agentkv.reply import Reply
from benchmarks._arms import APPEND_STATE, REWRITE, ArmTurn, Case, make_arm
from benchmarks._environment import environment
from examples.support_desk.bot import ANSWER_TOKENS, SupportDesk
from examples.support_desk.database import LABELS, ORDER_ID, fetch_order, update_order
from examples.support_desk.policy import POLICY, RETURNS
from examples.support_desk.script import SCRIPT, Step, reports


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn: agentkv, and beside it the other two ways."""

    turn: int
    question: str
    plan: str
    erratum: str
    prompt_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int
    computed_tokens: int
    new_tokens: int
    ttft_s: float
    answer: str
    rewrite_ttft_s: float
    rewrite_new_tokens: int
    rewrite_cached_tokens: int
    rewrite_computed_tokens: int
    rewrite_answer: str
    rewrite_reports_new: bool | None
    append_state_ttft_s: float
    append_state_new_tokens: int
    append_state_cached_tokens: int
    append_state_computed_tokens: int
    append_state_answer: str
    append_state_reports_new: bool | None
    field: str | None
    """Key of the field that changed since the turn before; None if nothing did."""
    new_value: str | None
    old_value: str | None
    reports_new: bool | None
    """Whether the answer states the value that is true; None where nothing changed."""
    reports_old: bool | None


def compare(backend: Backend, connection: sqlite3.Connection, console: Console) -> dict[str, Any]:
    """Run the script; prints each turn, and returns ``{"environment", "turns", "summary"}``.

    The sums run over turns 2 to 12: the first is cold in every way.
    """
    run = uuid.uuid4().hex
    case = Case(
        segments=(Policy(Inline(POLICY)), Skill("returns", RETURNS)),
        labels=LABELS,
        first_values=fetch_order(connection, ORDER_ID).fields(),
        sampling=SamplingOptions(max_tokens=ANSWER_TOKENS),
    )
    desk = SupportDesk(backend, connection, ORDER_ID)
    arms = [make_arm(name, backend, case, run=run) for name in (REWRITE, APPEND_STATE)]
    rows: list[TurnRow] = []
    with Progress(console=console, transient=True) as progress, desk.context as context:
        task = progress.add_task("turns", total=len(SCRIPT))
        for step in SCRIPT:
            for update in step.updates:
                update_order(connection, ORDER_ID, update.column, update.value)
            values = desk.refresh().fields()
            reply = context.ask(step.question)
            others = [arm.turn(values, step.question) for arm in arms]
            rows.append(_row(len(rows) + 1, step, reply, others))
            progress.advance(task)
            _print_turn(rows[-1], progress.console)
    for arm in arms:
        arm.close()
    summary = summarise(rows)
    _print_summary(summary, console)
    return {
        "environment": environment(backend=backend.capabilities.name),
        "turns": [asdict(row) for row in rows],
        "summary": summary,
    }


def _row(turn: int, step: Step, reply: Reply, others: Sequence[ArmTurn]) -> TurnRow:
    rewrite, append = others
    report, probe = reply.report, step.probe
    return TurnRow(
        turn=turn,
        question=step.question,
        plan=describe(report.plan),
        erratum=report.erratum,
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        predicted_cached_tokens=report.predicted_cached_tokens,
        computed_tokens=report.computed_tokens,
        new_tokens=report.new_tokens,
        ttft_s=report.ttft_s,
        answer=reply.text,
        rewrite_ttft_s=rewrite.ttft_s,
        rewrite_new_tokens=rewrite.new_tokens,
        rewrite_cached_tokens=rewrite.cached_tokens,
        rewrite_computed_tokens=rewrite.computed_tokens,
        rewrite_answer=rewrite.answer,
        rewrite_reports_new=reports(rewrite.answer, probe.new_value) if probe else None,
        append_state_ttft_s=append.ttft_s,
        append_state_new_tokens=append.new_tokens,
        append_state_cached_tokens=append.cached_tokens,
        append_state_computed_tokens=append.computed_tokens,
        append_state_answer=append.answer,
        append_state_reports_new=reports(append.answer, probe.new_value) if probe else None,
        field=probe.field if probe else None,
        new_value=probe.new_value if probe else None,
        old_value=probe.old_value if probe else None,
        reports_new=reports(reply.text, probe.new_value) if probe else None,
        reports_old=reports(reply.text, probe.old_value) if probe else None,
    )


def summarise(rows: Sequence[TurnRow]) -> dict[str, Any]:
    """Return the sums over all turns but the first."""
    later = rows[1:]
    ttft = sum(row.ttft_s for row in later)
    return {
        "cumulative_ttft_s": ttft,
        "cumulative_ttft_ratio": sum(row.rewrite_ttft_s for row in later) / ttft,
        "append_state_ttft_ratio": sum(row.append_state_ttft_s for row in later) / ttft,
        "cached_share": sum(row.cached_tokens for row in later) / sum(row.prompt_tokens for row in later),
        "mispredicted_turns": sum(row.cached_tokens != row.predicted_cached_tokens for row in later),
        "new_tokens": sum(row.new_tokens for row in later),
        "append_state_new_tokens": sum(row.append_state_new_tokens for row in later),
        "changed_turns": sum(row.field is not None for row in later),
        "new_values_reported": sum(bool(row.reports_new) for row in later),
        "old_values_reported": sum(bool(row.reports_old) for row in later),
        "rewrite_new_values_reported": sum(bool(row.rewrite_reports_new) for row in later),
        "append_state_new_values_reported": sum(bool(row.append_state_reports_new) for row in later),
    }


def _print_turn(row: TurnRow, console: Console) -> None:
    console.print(f"[bold]{row.turn:2}. {row.question}[/bold]", highlight=False)
    console.print(f"    plan:   {row.plan}", highlight=False, markup=False)
    if row.erratum:
        console.print(f"    told:   {row.erratum}", highlight=False, markup=False)
    console.print(f"    answer: {row.answer.strip()}", highlight=False, markup=False)
    if row.field is not None:
        judged = "reports the new value" if row.reports_new else "does NOT report the new value"
        console.print(f"    judged: {judged} ({row.new_value})", highlight=False, markup=False)
    table = Table("", "cached", "computed", "first token", box=None, padding=(0, 2, 0, 4))
    predicted = (
        "" if row.cached_tokens == row.predicted_cached_tokens else f" ({row.predicted_cached_tokens}!)"
    )
    table.add_row(
        "agentkv", f"{row.cached_tokens}{predicted}", f"{row.computed_tokens}", f"{row.ttft_s:.3f} s"
    )
    for name in ("rewrite", "append_state"):
        cached, ttft = getattr(row, f"{name}_cached_tokens"), getattr(row, f"{name}_ttft_s")
        computed = getattr(row, f"{name}_computed_tokens")
        table.add_row(name.replace("_", " "), f"{cached}", f"{computed}", f"{ttft:.3f} s")
    console.print(table)


def _print_summary(summary: dict[str, Any], console: Console) -> None:
    changed = summary["changed_turns"]
    table = Table("turns 2 to 12", "agentkv", "rewrite", "append state", title="Sums")
    ttft = summary["cumulative_ttft_s"]
    table.add_row(
        "time to first tokens",
        f"{ttft:.2f} s",
        f"{summary['cumulative_ttft_ratio']:.1f}×",
        f"{summary['append_state_ttft_ratio']:.1f}×",
    )
    table.add_row(
        "new values reported",
        f"{summary['new_values_reported']} of {changed}",
        f"{summary['rewrite_new_values_reported']} of {changed}",
        f"{summary['append_state_new_values_reported']} of {changed}",
    )
    console.print(table)
    console.print(
        f"{summary['cached_share']:.1%} of agentkv's prompt tokens came from the cache; "
        f"{summary['mispredicted_turns']} turns were mispredicted; "
        f"{summary['old_values_reported']} old values reported."
    )
