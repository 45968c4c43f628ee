"""How much is measured in each profile, and the arms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

AGENTKV: Final = "agentkv"
"""`AgentKVMiddleware`: the prompt stays, what changed is said in the newest message."""
DYNAMIC_PROMPT: Final = "dynamic_prompt"
"""LangChain's own middleware of that name: the system prompt is written anew before every model call."""
APPEND_STATE: Final = "append_state"
"""The prompt shows no values; the whole state stands in every question and tool result."""
ARMS: Final = (DYNAMIC_PROMPT, APPEND_STATE, AGENTKV)


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """A conversation of 8 turns."""
    FULL = "full"
    """Three conversations of 20 turns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a profile measures."""

    turns: int
    conversations: int
    policy_tokens: int = 600
    """About so many tokens has the system prompt."""
    answer_tokens: int = 24


PLANS: Final[Mapping[Profile, Plan]] = {
    Profile.QUICK: Plan(turns=8, conversations=1),
    Profile.FULL: Plan(turns=20, conversations=3),
}
