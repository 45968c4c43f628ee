"""The tables of a result, for the terminal and the docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.agent.measure import summary
from benchmarks.agent.plan import ARMS

_LINES: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("new tokens a turn", lambda arm: f"{arm['new_tokens_a_turn']:.1f}"),
    ("computed tokens a turn", lambda arm: f"{arm['computed_tokens_a_turn']:.1f}"),
    ("prompt tokens from the cache", lambda arm: f"{arm['cached_share']:.1%}"),
    (
        "calls with less cached than the prompt before",
        lambda arm: f"{arm['calls_short_of_blocks']} of {arm['calls']}",
    ),
    ("time to first token after a change, p50", lambda arm: f"{arm['ttft_after_change_p50']:.2f} s"),
    ("time to first token, p50", lambda arm: f"{arm['ttft_p50']:.2f} s"),
    ("times to first token, summed", lambda arm: f"{arm['ttft_sum_s']:.1f} s"),
    ("new values reported", lambda arm: f"{arm['new_values_reported']} of {arm['changed_turns']}"),
    ("old values reported", lambda arm: str(arm["old_values_reported"])),
    ("tools called", lambda arm: str(arm["tool_calls"])),
)


def lines(result: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return head and rows of the comparison, computed from the raw rows."""
    arms = summary(result["rows"])["arms"]
    return ["", *ARMS], [[title, *(cell(arms[name]) for name in ARMS)] for title, cell in _LINES]


def table(result: Mapping[str, Any]) -> Table:
    """Return the comparison for the terminal."""
    head, rows = lines(result)
    made = Table(*head, title="A LangChain agent whose facts change in every other turn")
    for row in rows:
        made.add_row(*row)
    return made
