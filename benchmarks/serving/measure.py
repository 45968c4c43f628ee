"""Raw rows, and the numbers that are computed from them alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.backends.base import Usage
from benchmarks.serving.counters import Counters
from benchmarks.serving.load import Taken
from benchmarks.serving.record import Call, rule

Row = Mapping[str, Any]


def make_rows(
    taken: Sequence[Taken], calls: Sequence[Call], start: float, block: int, *, predicts: bool
) -> list[dict[str, Any]]:
    """Return a row for each request; times in seconds, from the series' `start` on.

    Parameters
    ----------
    calls
        All calls so far in the order of sending, from which the cached tokens follow by rule.
    predicts
        Whether the sender predicts cached tokens from its own history.
    """
    places = {id(call): index for index, call in enumerate(calls)}
    rows = []
    for one in taken:
        call = one.call
        row: dict[str, Any] = {
            "number": one.number,
            "scheduled_s": one.scheduled - start,
            "duration_s": one.ended - one.scheduled,
        }
        if one.agent is not None:
            row["agent"] = one.agent
        if call is None or call.usage is None or call.first is None or one.error is not None:
            rows.append({**row, "failed": one.error or "no answer"})
            continue
        usage: Usage = call.usage
        rows.append(
            {
                **row,
                "failed": None,
                "sent_s": call.sent - start,
                "ttft_s": call.first - one.scheduled,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "predicted_cached_tokens": call.expected if predicts else None,
                "rule_cached_tokens": rule(call, calls[: places[id(call)]], block),
                "new_tokens": len(call.ids) - call.ids.common_prefix(one.before.sequence),
                "generated_tokens": usage.generated_tokens,
            }
        )
    return rows


def answered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of requests that did not fail."""
    return [row for row in rows if not row["failed"]]


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, between two values in proportion; `share` is 0.9 for the 90th.

    Raises
    ------
    ValueError
        There is no value.
    """
    if not values:
        raise ValueError("there is no value to take a percentile of")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ttft(rows: Sequence[Row], share: float) -> float:
    """Return a percentile of the time to first token, in seconds; infinite if all requests failed."""
    times = [row["ttft_s"] for row in answered(rows)]
    return percentile(times, share) if times else float("inf")


def throughput(rows: Sequence[Row], warmup: int = 0) -> float:
    """Return answered requests a second, from the first arrival to the last answer.

    Parameters
    ----------
    warmup
        So many first answers do not count: the time begins with the last of them.
    """
    ends = sorted(row["scheduled_s"] + row["duration_s"] for row in answered(rows))
    if len(ends) <= warmup:
        return 0.0
    begin = ends[warmup - 1] if warmup else min(row["scheduled_s"] for row in rows)
    return float((len(ends) - warmup) / (ends[-1] - begin))


def summary(rows: Sequence[Row], counted: Counters | None) -> dict[str, Any]:
    """Return what a series of one arm comes to, with its rows and the server's counters."""
    good = answered(rows)
    return {
        "ttft_p50": ttft(rows, 0.5),
        "ttft_p90": ttft(rows, 0.9),
        "ttft_p99": ttft(rows, 0.99),
        "throughput": throughput(rows),
        "cached_tokens": sum(row["cached_tokens"] for row in good),
        "prompt_tokens": sum(row["prompt_tokens"] for row in good),
        "counters": None
        if counted is None
        else {"cached_tokens": counted.hits, "prompt_tokens": counted.queries},
        "failed": len(rows) - len(good),
        "at_rule": sum(row["cached_tokens"] == row["rule_cached_tokens"] for row in good),
        "rows": list(rows),
    }


def later(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a conversation's turns from the second on."""
    return [row for row in rows if row["number"] >= 2]


def talk_summary(rows: Sequence[Row], counted: Counters | None) -> dict[str, Any]:
    """Return what conversations come to: times and new tokens are those from the second turn on."""
    counting = later(rows)
    good = answered(counting)
    return {
        **summary(rows, counted),
        "ttft_p50": ttft(counting, 0.5),
        "ttft_p90": ttft(counting, 0.9),
        "ttft_p99": ttft(counting, 0.99),
        "new_tokens_per_turn": statistics.mean(row["new_tokens"] for row in good) if good else float("inf"),
        "turns": max(row["number"] for row in rows),
    }


def ratio(slow: Sequence[Row], fast: Sequence[Row], share: float) -> float:
    """Return how many times sooner the first tokens of the second rows come, at a percentile."""
    return ttft(slow, share) / ttft(fast, share)


def all_sizes(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the result of each prompt size with its rows; those of the first stand at the top alone."""
    return [result, *result.get("sizes", ())[1:]]


def residues(rows: Sequence[Row], block: int) -> list[int]:
    """Return the remainders that prompt lengths leave when divided by the block, in order."""
    return sorted({row["prompt_tokens"] % block for row in answered(rows)})
