"""What agentkv promises of an agent, and what of it a result misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.agent.measure import (
    Row,
    a_turn,
    after_change,
    later,
    of,
    short_of_blocks,
    ttft,
)
from benchmarks.agent.plan import AGENTKV, APPEND_STATE, ARMS, DYNAMIC_PROMPT, Profile

SOONER: Final[Mapping[Profile, float]] = {Profile.QUICK: 2.0, Profile.FULL: 3.0}
"""The median time to first token of `dynamic_prompt` over agentkv's, in calls that tell of a change."""


def promised(profile: Profile) -> dict[str, Any]:
    """Return the thresholds by name."""
    return {
        "ttft_dynamic_prompt_over_agentkv": SOONER[profile],
        "cached_tokens": "at least the whole blocks of the prompt before, in every call",
        "new_tokens_a_turn": "below append_state's",
        "new_values_reported": "not fewer than dynamic_prompt's",
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return what falls short, computed from the raw rows alone; empty if nothing does."""
    rows: Sequence[Row] = result["rows"]
    profile = Profile(result["environment"]["profile"])
    return [*_as_asked(rows), *_cached(of(rows, AGENTKV)), *_compared(rows, profile)]


def _as_asked(rows: Sequence[Row]) -> Iterator[str]:
    """Check that what is compared took place: every arm called its tool."""
    for name in ARMS:
        own = of(rows, name)
        missed = [row for row in own if row["calls_tool"] and row["call"] == 1 and not row["called"]]
        if missed:
            turns = ", ".join(str(row["turn"]) for row in missed)
            yield f"{name}: no tool was called in turns {turns}"


def _cached(rows: Sequence[Row]) -> Iterator[str]:
    short = short_of_blocks(rows)
    if short:
        one = short[0]
        yield (
            f"{len(short)} of {len(later(rows))} calls had less cached than the whole blocks of the prompt "
            f"before, such as turn {one['turn']}: {one['cached_tokens']} of {one['whole_blocks_before']}"
        )
    opened = [row for row in later(rows) if row["reason"]]
    if opened:
        one = opened[0]
        yield f"{len(opened)} calls opened a new epoch, such as turn {one['turn']}: {one['reason']}"


def _compared(rows: Sequence[Row], profile: Profile) -> Iterator[str]:
    own, rewriting, appending = (of(rows, name) for name in (AGENTKV, DYNAMIC_PROMPT, APPEND_STATE))
    sooner = ttft(after_change(rewriting)) / max(ttft(after_change(own)), 1e-9)
    if not sooner >= SOONER[profile]:
        yield (
            f"after a change: first tokens {sooner:.1f} times sooner than {DYNAMIC_PROMPT}, "
            f"not {SOONER[profile]:g}"
        )
    mine, theirs = a_turn(own, "new_tokens"), a_turn(appending, "new_tokens")
    if not mine < theirs:
        yield f"{mine:.1f} new tokens a turn, not below {APPEND_STATE}'s {theirs:.1f}"
    found, least = (sum(row.get("reports_new", False) for row in part) for part in (own, rewriting))
    if found < least:
        yield f"{found} new values reported, fewer than {DYNAMIC_PROMPT}'s {least}"
