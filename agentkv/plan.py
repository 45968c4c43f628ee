"""What to do about a difference: say it, add to it, or begin again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

from agentkv.costs import Costs
from agentkv.diff import Change, Difference, Gone, changes_policy, label_of
from agentkv.entries import RebaseReason
from agentkv.hunks import find_hunk
from agentkv.ledger import Ledger
from agentkv.profile import Profile, Restate
from agentkv.prompt import Prompt
from agentkv.segments import Deletion, TextSegment
from agentkv.tools import ToolSpec


class Mode(StrEnum):
    """What a context does with a difference."""

    ON = "on"
    """Say it as an erratum; keep the prefix."""
    OBSERVE = "observe"
    """Rewrite the prompt as the caller would have, and report what would have been saved."""
    OFF = "off"
    """Rewrite the prompt; the kill switch."""


@dataclass(frozen=True, slots=True)
class AppendErratum:
    """State current values behind everything the model has read."""

    changes: tuple[Change, ...] = ()
    gone: tuple[Gone, ...] = ()
    restated: tuple[str, ...] = ()
    """Keys of standing fields that are said again."""
    snapshot: bool = False
    """Whether every field told so far is stated."""
    replaced: tuple[str, ...] = ()
    """What an `AppendSegment` of the same plan replaces, as the erratum calls it."""

    def __str__(self) -> str:
        keys = (
            *(change.key for change in self.changes),
            *(f"-{gone.key}" for gone in self.gone),
            *(f"replaced {label}" for label in self.replaced),
        )
        again = f" again({', '.join(self.restated)})" if self.restated else ""
        return f"erratum{'+snapshot' if self.snapshot else ''}({', '.join(keys)}){again}"


@dataclass(frozen=True, slots=True)
class AppendSegment:
    """Add skills, documents or tools behind everything the model has read."""

    segments: tuple[TextSegment, ...] = ()
    tools: tuple[ToolSpec, ...] = ()

    def __str__(self) -> str:
        return (
            f"append({', '.join([*(s.key for s in self.segments), *(f'tool:{t.name}' for t in self.tools)])})"
        )


@dataclass(frozen=True, slots=True)
class Rebase:
    """Write the current values into the prompt and open the next epoch."""

    reason: RebaseReason

    def __str__(self) -> str:
        return f"rebase({self.reason.value})"


@dataclass(frozen=True, slots=True)
class Prime:
    """See to it that the prompt is in the cache up to where a splice begins."""

    length: int
    """Leading tokens of the prompt."""

    def __str__(self) -> str:
        return f"prime({self.length})"


@dataclass(frozen=True, slots=True)
class Splice:
    """Load the KV of a segment's prompt tokens ``[start, stop)`` from its artifact."""

    key: str
    start: int
    stop: int
    artifact: str

    def __str__(self) -> str:
        return f"splice({self.key}, {self.stop - self.start} tokens)"


Operation: TypeAlias = AppendErratum | AppendSegment | Rebase | Prime | Splice
"""One step of a turn's plan."""

Plan: TypeAlias = tuple[Operation, ...]
"""The operations of one turn, in order; empty means keep."""


def describe(plan: Plan) -> str:
    """Return a plan as one line of text."""
    return " + ".join(map(str, plan)) or "keep"


def make_plan(
    difference: Difference,
    prompt: Prompt,
    ledger: Ledger,
    profile: Profile,
    costs: Costs,
    *,
    asked: str,
    window: int,
    mode: Mode,
    requested: RebaseReason | None,
) -> Plan:
    """Choose the operations of a turn.

    Parameters
    ----------
    asked
        The user's text of this turn, searched for the fields it touches.
    window
        The model's context window in tokens.
    requested
        A rebase that the caller asked for.
    """
    gone = tuple(gone for gone in difference.gone if gone.deletion is Deletion.SOFT)
    restated = _restated(difference, prompt, ledger, profile, asked)
    replaced = tuple(_replaced(difference, ledger))
    reason = _rebase_reason(difference, prompt, ledger, mode, requested)
    if reason is None and mode is Mode.ON and (difference.changes or gone or restated or replaced):
        reason = _erratum_refused(difference, ledger, profile, costs, window)
    if reason is not None:
        return (Rebase(reason),)
    if mode is not Mode.ON:
        return ()
    operations: list[Operation] = []
    if difference.segments or difference.tools:
        operations.append(AppendSegment(difference.segments, difference.tools))
    if difference.changes or gone or restated or replaced:
        snapshot = ledger.state.since_snapshot + 1 >= profile.snapshot_every
        said_again = () if snapshot else restated
        operations.append(AppendErratum(difference.changes, gone, said_again, snapshot, replaced))
    return tuple(operations)


def _replaced(difference: Difference, ledger: Ledger) -> Iterator[str]:
    state = ledger.state
    for segment in difference.segments:
        if state.segments.get(segment.key) is not None:
            yield label_of(segment.key)
    for tool in difference.tools:
        if state.tools.get(tool.name) is not None:
            yield label_of(f"tool:{tool.name}")


def _rebase_reason(
    difference: Difference,
    prompt: Prompt,
    ledger: Ledger,
    mode: Mode,
    requested: RebaseReason | None,
) -> RebaseReason | None:
    state = ledger.state
    if state.frozen is None:
        return RebaseReason.FIRST
    if any(gone.deletion is Deletion.HARD for gone in difference.gone):
        return RebaseReason.ERASED
    if requested is not None:
        return requested
    if dict(prompt.template_arguments) != state.frozen.template_arguments:
        return RebaseReason.MODEL
    if mode is not Mode.ON:
        said = [gone for gone in difference.gone if gone.deletion is not Deletion.DORMANT]
        said_more = difference.changes or difference.segments or difference.tools
        return RebaseReason.REWRITE if said or said_more else None
    if changes_policy(difference):
        return RebaseReason.POLICY
    for gone in difference.gone:
        if gone.deletion is Deletion.WITHDRAWN:
            return RebaseReason.POLICY if gone.key.startswith("policy:") else RebaseReason.WITHDRAWN
    return None


def _erratum_refused(
    difference: Difference, ledger: Ledger, profile: Profile, costs: Costs, window: int
) -> RebaseReason | None:
    state = ledger.state
    if state.frozen is not None and profile.wording.announcement not in state.frozen.system:
        return RebaseReason.UNANNOUNCED
    for change in difference.changes:
        told = state.fields.get(change.key)
        if told is not None and told.superseded + 1 > profile.max_superseded:
            return RebaseReason.SUPERSEDED
        if change.field.critical and _disobeyed(profile):
            return RebaseReason.CRITICAL
        if _too_long(change, profile):
            return RebaseReason.LARGE
    if state.errata_tokens > profile.max_errata_share * window:
        return RebaseReason.SHARE
    if state.errata_tokens and costs.rebase_pays(state.errata_tokens, len(ledger.ids or ())):
        return RebaseReason.COST
    return None


def _disobeyed(profile: Profile) -> bool:
    return profile.obedience is None or profile.obedience < profile.critical_obedience


def _too_long(change: Change, profile: Profile) -> bool:
    now = change.field.text
    if len(now) <= profile.max_statement_chars:
        return False
    if change.told is None:
        return True
    hunk = find_hunk(change.told, now)
    return len(hunk.old) + len(hunk.new) > profile.max_statement_chars


def _restated(
    difference: Difference, prompt: Prompt, ledger: Ledger, profile: Profile, asked: str
) -> tuple[str, ...]:
    if profile.restate is Restate.NEVER or not ledger.state.errata:
        return ()
    new = {change.key for change in difference.changes}
    asked_words = _words(asked) if profile.restate is Restate.TOUCHED else frozenset()
    keys = []
    for key, told in ledger.state.fields.items():
        field = prompt.fields.get(key)
        if not told.standing or key in new or field is None or len(field.text) > profile.max_statement_chars:
            continue
        if profile.restate is Restate.ALWAYS or _names(asked_words, field.label):
            keys.append(key)
    return tuple(keys)


_COMMON = frozenset(
    (
        "a", "an", "and", "at", "by", "for", "from", "in", "is", "it", "its", "my", "of", "on", "or", "our",
        "the", "their", "this", "to", "was", "with", "your",
    )
)  # fmt: skip


def _names(asked: frozenset[str], label: str) -> bool:
    """Whether a text holds more than half of a label's words."""
    words = _words(label)
    return 2 * len(words & asked) > len(words)


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold())) - _COMMON
