"""The tables of the serving benchmark, from its raw rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._arms import AGENTKV, ARMS, REWRITE
from benchmarks.serving.measure import all_sizes, answered, later, ratio, throughput, ttft

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def unloaded(result: Mapping[str, Any]) -> Table:
    """Return times to first token, one request at a time, for each prompt size."""
    rows = []
    for size in all_sizes(result):
        arms = size["unloaded"]["arms"]
        sooner = ratio(arms[REWRITE]["rows"], arms[AGENTKV]["rows"], 0.5)
        rows.append([f"{size['asked_tokens']:,}", *_cells(arms, 0.5), f"{sooner:.1f}×"])
    return ["prompt tokens", *ARMS, "rewrite over agentkv"], rows


def loads(result: Mapping[str, Any]) -> Table:
    """Return percentiles of the time to first token at each offered load."""
    rows = []
    for size in all_sizes(result):
        for load in size["loads"]:
            arms = load["arms"]
            offered = f"{load['rate']:g} a second, {load['requests']} requests"
            for share in (0.5, 0.9, 0.99):
                sooner = ratio(arms[REWRITE]["rows"], arms[AGENTKV]["rows"], share)
                rows.append(
                    [
                        f"{size['asked_tokens']:,}",
                        offered,
                        f"p{share * 100:.0f}",
                        *_cells(arms, share),
                        f"{sooner:.0f}×",
                    ]
                )
    return ["prompt tokens", "offered", "", *ARMS, "rewrite over agentkv"], rows


def saturated(result: Mapping[str, Any]) -> Table:
    """Return requests a second with clients in a closed loop."""
    arms = result["saturated"]["arms"]
    rates = {name: throughput(arm["rows"]) for name, arm in arms.items()}
    return (
        ["", *ARMS],
        [
            ["requests a second", *(f"{rates[name]:.3f}" for name in ARMS)],
            ["over rewrite", *(f"{rates[name] / rates[REWRITE]:.1f}×" for name in ARMS)],
        ],
    )


def conversations(result: Mapping[str, Any]) -> Table:
    """Return new tokens and times of the turns from the second on."""
    arms = result["conversations"]["arms"]
    rows: dict[str, list[Any]] = {name: later(arms[name]["rows"]) for name in ARMS if name in arms}

    def new_tokens(name: str) -> str:
        good = answered(rows[name])
        return f"{sum(row['new_tokens'] for row in good) / len(good):.1f}"

    return (
        ["", *rows],
        [
            ["new tokens a turn", *(new_tokens(name) for name in rows)],
            ["time to first token, p50", *(f"{ttft(rows[name], 0.5):.2f} s" for name in rows)],
            ["p90", *(f"{ttft(rows[name], 0.9):.2f} s" for name in rows)],
            ["turns measured", *(str(len(rows[name])) for name in rows)],
        ],
    )


def _cells(arms: Mapping[str, Any], share: float) -> list[str]:
    return [f"{ttft(arms[name]['rows'], share):.2f} s" if name in arms else "–" for name in ARMS]
