"""How much is measured in each profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agentkv import Mode
from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, REWRITE

CLIENTS: Final = 8
"""Clients of the closed loop."""
AGENTS: Final = 8
"""Agents whose conversations run at once."""
SATURATED_TOKENS: Final = 64
"""Output tokens of each request in the closed loop."""


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """1,500 tokens, a few minutes."""
    FULL = "full"
    """4,000 and 8,000 tokens."""
    CONVERSATIONS = "conversations"
    """The conversations of `FULL` alone."""


@dataclass(frozen=True, slots=True)
class Count:
    """Requests of a series: so many for the arms that keep the prefix, and for those that lose it."""

    kept: int
    lost: int

    def of(self, arm: str, mode: Mode) -> int:
        """Return the number for an arm; `mode` is that of the arm agentkv."""
        loses = arm == REWRITE or (arm == AGENTKV and mode is not Mode.ON)
        return self.lost if loses else self.kept


@dataclass(frozen=True, slots=True)
class Load:
    """One offered load."""

    utilisation: float
    """The rate over what rewriting can serve, one request at a time: above 1 its queue grows for ever."""
    requests: int


@dataclass(frozen=True, slots=True)
class SizePlan:
    """What is measured at one prompt size."""

    asked_tokens: int
    """About so many tokens has the prompt of a request."""
    unloaded: Count
    loads: tuple[Load, ...]
    saturated: Count | None = None
    turns: Count = Count(12, 12)
    """Turns of each conversation."""
    talking: tuple[str, ...] = ()
    """Arms that hold conversations."""
    output_tokens: int = 8
    """Of a single request that is not of the closed loop."""
    talk_tokens: int = 16
    """Of a turn in a conversation."""
    arms: tuple[str, ...] = ARMS


PLANS: Final[Mapping[Profile, tuple[SizePlan, ...]]] = {
    # Rewriting costs about 5 s a request on two cores, so each of its requests has to be worth it.
    Profile.QUICK: (
        SizePlan(
            asked_tokens=1500,
            unloaded=Count(kept=5, lost=2),
            loads=(Load(2.0, 3), Load(6.0, 8)),
            saturated=Count(kept=16, lost=8),
            turns=Count(kept=12, lost=3),
            talking=(APPEND_STATE, AGENTKV),
            talk_tokens=4,
        ),
    ),
    Profile.FULL: (
        SizePlan(
            asked_tokens=4000,
            unloaded=Count(kept=12, lost=3),
            loads=(Load(0.9, 4), Load(8.0, 16)),
            saturated=Count(kept=32, lost=16),
            turns=Count(kept=12, lost=2),
            talking=ARMS,
        ),
        SizePlan(
            asked_tokens=8000, unloaded=Count(kept=6, lost=2), loads=(Load(8.0, 3),), arms=(REWRITE, AGENTKV)
        ),
    ),
    Profile.CONVERSATIONS: (
        SizePlan(
            asked_tokens=4000,
            unloaded=Count(kept=2, lost=1),
            loads=(),
            turns=Count(kept=12, lost=2),
            talking=(APPEND_STATE, AGENTKV),
        ),
    ),
}
