"""What was measured, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

_TIMES = ("ttft_p50", "ttft_p90", "ttft_p99")


def tables(size: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for each series of a prompt size."""
    asked = f"{size['asked_tokens']:,} tokens"
    yield _table(f"{asked}, one request at a time", size["unloaded"]["arms"])
    for load in size["loads"]:
        yield _table(
            f"{asked}, {load['requests']} requests at {load['rate']:g} a second "
            f"({load['rewrite_utilisation']:g} times what rewriting can serve)",
            load["arms"],
        )
    if "saturated" in size:
        part = size["saturated"]
        yield _table(
            f"{asked}, {part['clients']} clients in a closed loop, {part['output_tokens']} output tokens",
            part["arms"],
        )
    if "conversations" in size:
        part = size["conversations"]
        yield _table(f"{asked}, conversations of {part['agents']} agents at once", part["arms"])


def _table(title: str, arms: Mapping[str, Any]) -> Table:
    talks = any("new_tokens_per_turn" in arm for arm in arms.values())
    head = ["arm", "TTFT p50", "p90", "p99", "requests/s", "cached", "failed", "by rule"]
    table = Table(*head, *(["new tokens"] if talks else []), title=title)
    for name, arm in arms.items():
        cells = [name, *(f"{arm[key]:.2f} s" for key in _TIMES), f"{arm['throughput']:.3f}"]
        share = arm["cached_tokens"] / arm["prompt_tokens"] if arm["prompt_tokens"] else 0.0
        cells += [f"{share:.1%}", str(arm["failed"]), f"{arm['at_rule']}/{len(arm['rows'])}"]
        table.add_row(*cells, *([f"{arm['new_tokens_per_turn']:.1f}"] if talks else []))
    return table
