"""What agentkv promises of a server's clients, and what of it a result misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from benchmarks._arms import AGENTKV, APPEND_STATE, HOIST, REWRITE
from benchmarks.serving.measure import Row, all_sizes, answered, later, ratio, throughput, ttft
from benchmarks.serving.plan import Profile

UNLOADED: Final[Mapping[Profile, float]] = {Profile.QUICK: 6.0, Profile.FULL: 15.0}
"""Rewriting's median time to first token over agentkv's, one request at a time."""
LOADED: Final[Mapping[Profile, float]] = {Profile.QUICK: 10.0, Profile.FULL: 100.0}
"""The same at the 90th percentile, at the highest offered load."""
SATURATED: Final[Mapping[Profile, float]] = {Profile.QUICK: 3.0, Profile.FULL: 10.0}
"""Agentkv's requests a second over rewriting's, with clients in a closed loop."""


def promised(profile: Profile) -> dict[str, float]:
    """Return the least ratios that are asked for, by name."""
    if profile is Profile.CONVERSATIONS:
        return {}
    return {
        "unloaded_ttft_p50": UNLOADED[profile],
        "loaded_ttft_p90": LOADED[profile],
        "saturated_throughput": SATURATED[profile],
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return what falls short, computed from the raw rows alone; empty if nothing does."""
    profile = Profile(result["environment"]["profile"])
    found = [*_talks(result)]
    if profile is not Profile.CONVERSATIONS:
        found = [*_times(result, profile), *_saturated(result["saturated"], profile), *found]
    if profile is not Profile.CONVERSATIONS and not result["residues_covered"]:
        found.append(
            f"prompt lengths leave {len(result['residues'])} of {result['block_size']} remainders of a block"
        )
    for size in all_sizes(result):
        found += _calls(size, own_server=bool(result["environment"]["own_server"]))
    return found


def _times(result: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    arms = result["unloaded"]["arms"]
    sooner = ratio(arms[REWRITE]["rows"], arms[AGENTKV]["rows"], 0.5)
    if not sooner >= UNLOADED[profile]:
        yield f"unloaded: first tokens {sooner:.1f} times sooner than rewriting, not {UNLOADED[profile]:g}"
    load = max(result["loads"], key=lambda load: float(load["rate"]))
    sooner = ratio(load["arms"][REWRITE]["rows"], load["arms"][AGENTKV]["rows"], 0.9)
    if not sooner >= LOADED[profile]:
        yield (
            f"{load['rate']:g} requests a second, {load['requests']} of them: 90 of 100 first tokens "
            f"{sooner:.1f} times sooner than rewriting, not {LOADED[profile]:g}"
        )


def _saturated(part: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    rates = {name: throughput(arm["rows"]) for name, arm in part["arms"].items()}
    own = rates[AGENTKV]
    if not own >= SATURATED[profile] * rates[REWRITE]:
        yield (
            f"saturated: {own:.3f} requests a second against rewriting's {rates[REWRITE]:.3f}, not "
            f"{SATURATED[profile]:g} times as many"
        )
    for name in (APPEND_STATE, HOIST):
        if own < rates[name]:
            yield f"saturated: {own:.3f} requests a second, below {name}'s {rates[name]:.3f}"


def _talks(result: Mapping[str, Any]) -> Iterator[str]:
    arms = result["conversations"]["arms"]
    own, other = later(arms[AGENTKV]["rows"]), later(arms[APPEND_STATE]["rows"])
    mine, theirs = _new_tokens(own), _new_tokens(other)
    if not mine <= theirs:
        yield f"conversations: {mine:.1f} new tokens a turn, above append_state's {theirs:.1f}"
    if not ttft(own, 0.5) <= ttft(other, 0.5):
        yield (
            f"conversations: first tokens after {ttft(own, 0.5):.3f} s, later than append_state's "
            f"{ttft(other, 0.5):.3f} s"
        )


def _new_tokens(rows: list[Row]) -> float:
    good = answered(rows)
    return sum(row["new_tokens"] for row in good) / len(good) if good else float("inf")


def _calls(size: Mapping[str, Any], *, own_server: bool) -> Iterator[str]:
    """What went wrong with single calls: failed ones, and cached tokens that do not follow the rule."""
    for what, arms in series(size):
        for name, arm in arms.items():
            rows = arm["rows"]
            failed = len(rows) - len(answered(rows))
            if failed:
                yield f"{what}: {failed} of {len(rows)} requests of {name} failed"
            elif own_server and not _counted(arm):
                yield f"{what}: the server counted {arm['counters']} for {name}, its answers say otherwise"
        wrong = (
            [row for row in answered(arms[AGENTKV]["rows"]) if not _by_rule(what, row)]
            if AGENTKV in arms
            else []
        )
        if wrong:
            first = wrong[0]
            yield (
                f"{what}: cached tokens of {len(wrong)} requests are not those of the rule, such as "
                f"{first['cached_tokens']} where it gives {first['rule_cached_tokens']}"
            )


def _by_rule(what: str, row: Row) -> bool:
    cached, most = row["cached_tokens"], row["rule_cached_tokens"]
    # Until it has a history of its own, an agent may share what another one has sent in the same moment.
    alone = what == UNLOADED_SERIES or (what == TALK_SERIES and row["number"] >= 2)
    return bool(cached == most if alone else row["predicted_cached_tokens"] <= cached <= most)


def _counted(arm: Mapping[str, Any]) -> bool:
    good, counters = answered(arm["rows"]), arm["counters"]
    return bool(
        counters["cached_tokens"] == sum(row["cached_tokens"] for row in good)
        and counters["prompt_tokens"] == sum(row["prompt_tokens"] for row in good)
    )


UNLOADED_SERIES: Final = "unloaded"
TALK_SERIES: Final = "conversations"


def series(size: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what each series is called, and its arms, if they have rows."""
    parts = [(UNLOADED_SERIES, size["unloaded"])]
    parts += [(f"{load['rate']:g} requests a second", load) for load in size["loads"]]
    parts += [(name, size[name]) for name in ("saturated", TALK_SERIES) if name in size]
    for name, part in parts:
        arms = {arm: found for arm, found in part["arms"].items() if "rows" in found}
        if arms:
            yield name, arms
