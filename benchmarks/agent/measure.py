"""The numbers that are computed from the raw rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.agent.plan import AGENTKV, ARMS, DYNAMIC_PROMPT

Row = Mapping[str, Any]


def of(rows: Sequence[Row], arm: str) -> list[Row]:
    """Return an arm's rows."""
    return [row for row in rows if row["arm"] == arm]


def later(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of all calls but each conversation's first, which is cold in every arm."""
    return [row for row in rows if (row["turn"], row["call"]) != (1, 1)]


def short_of_blocks(rows: Sequence[Row]) -> list[Row]:
    """Return the calls that had fewer tokens cached than the whole blocks of the prompt before."""
    return [row for row in later(rows) if row["cached_tokens"] < row["whole_blocks_before"]]


def a_turn(rows: Sequence[Row], name: str) -> float:
    """Return the sum of a turn's calls, on average over turns from the second on; infinite without any.

    Parameters
    ----------
    name
        Of the number that is added up, such as ``"new_tokens"``.
    """
    counting = [row for row in rows if row["turn"] >= 2]
    turns = {(row["conversation"], row["turn"]) for row in counting}
    return sum(row[name] for row in counting) / len(turns) if turns else float("inf")


def ttft(rows: Sequence[Row]) -> float:
    """Return the median time to first token in seconds; infinite if there is no row."""
    return statistics.median(row["ttft_s"] for row in rows) if rows else float("inf")


def after_change(rows: Sequence[Row]) -> list[Row]:
    """Return the calls that are the first to tell of a change."""
    return [row for row in rows if row["after_change"]]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the sums of a run, arm by arm."""
    arms = {name: _arm(of(rows, name)) for name in ARMS}
    own = ttft(after_change(of(rows, AGENTKV)))
    return {
        "arms": arms,
        "ttft_dynamic_prompt_over_agentkv": ttft(after_change(of(rows, DYNAMIC_PROMPT))) / own
        if own
        else 0.0,
    }


def _arm(rows: Sequence[Row]) -> dict[str, Any]:
    warm = later(rows)
    whole = sum(row["prompt_tokens"] for row in warm)
    judged = [row for row in rows if "reports_new" in row]
    return {
        "calls": len(rows),
        "tool_calls": sum(len(row["called"]) for row in rows),
        "calls_short_of_blocks": len(short_of_blocks(rows)),
        "cached_share": sum(row["cached_tokens"] for row in warm) / whole if whole else 0.0,
        "new_tokens_a_turn": a_turn(rows, "new_tokens"),
        "computed_tokens_a_turn": a_turn(rows, "computed_tokens"),
        "ttft_after_change_p50": ttft(after_change(rows)),
        "ttft_p50": ttft(warm),
        "ttft_sum_s": sum(row["ttft_s"] for row in warm),
        "new_values_reported": sum(row["reports_new"] for row in judged),
        "old_values_reported": sum(row["reports_old"] for row in judged),
        "changed_turns": len(judged),
        "epochs": sum(bool(row["reason"]) for row in rows),
    }
