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


def throughput(rows: Sequence[Row]) -> float:
    """Return answered requests a second, from the first arrival to the last answer.

    No part is left out: answers of a batch end together, so a window that begins at one of them holds work
    that was done before it.
    """
    ends = [row["scheduled_s"] + row["duration_s"] for row in answered(rows)]
    if not ends:
        return 0.0
    return float(len(ends) / (max(ends) - min(row["scheduled_s"] for row in rows)))


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


def recomputed(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier result with its saturated throughput computed anew from the raw rows."""
    if "saturated" not in result:
        return dict(result)
    part = result["saturated"]
    arms = {}
    for name, arm in part["arms"].items():
        rate = throughput(arm["rows"])
        kept = {key: value for key, value in arm.items() if key != "warmup"}
        arms[name] = {**kept, "throughput": rate, "output_tokens_per_s": rate * part["output_tokens"]}
    rates = {name: arm["throughput"] for name, arm in arms.items()}
    made = {**result, "saturated": {**part, "throughput": rates, "arms": arms}}
    sizes = made.get("sizes", [])
    if sizes:
        first = {key: made[key] for key in sizes[0]}
        made["sizes"] = [without_rows(first), *sizes[1:]]
    return made


def without_rows(part: Any) -> Any:
    """Return a copy of a result without raw rows."""
    if isinstance(part, dict):
        return {key: without_rows(value) for key, value in part.items() if key != "rows"}
    return [without_rows(value) for value in part] if isinstance(part, list) else part


def residues(rows: Sequence[Row], block: int) -> list[int]:
    """Return the remainders that prompt lengths leave when divided by the block, in order."""
    return sorted({row["prompt_tokens"] % block for row in answered(rows)})
