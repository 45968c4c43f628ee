"""How errata are worded, carried and repeated for one model and chat template."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentkv.entries import Carrier


class Restate(StrEnum):
    """When a standing erratum is said again although nothing changed."""

    NEVER = "never"
    TOUCHED = "touched"
    """When the user's message holds more than half of the words of the field's label."""
    ALWAYS = "always"


class Wording(BaseModel):
    """Sentences with ``{revision}``, ``{label}``, ``{old}`` and ``{new}``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    announcement: str = (
        "Facts can change during the conversation. A change is stated in a line that starts with "
        '"Update" and a number. The update with the highest number is true; use it instead of '
        "any earlier value and of what was concluded from it."
    )
    """Said once, in the trusted, frozen part."""
    header: str = "Update {revision}: "
    """Begins every line of an erratum."""
    changed: str = "the {label} is no longer {old}. The {label} is now {new}."
    fresh: str = "the {label} is now {new}."
    """For a field that was never told, is sensitive, or whose old value is not to be repeated."""
    gone: str = "the {label} no longer applies."
    voided: str = " What was concluded about the {labels} before no longer holds."
    line: str = "{label}: {new}"
    """One field of a snapshot, or of an erratum that states many."""

    @field_validator("header")
    @classmethod
    def _numbered(cls, header: str) -> str:
        word, found, _ = header.partition("{revision}")
        if not found or not any(c.isalpha() for c in word):
            raise ValueError("the header needs a word and then {revision}")
        if len(header.splitlines()) != 1:
            raise ValueError("the header must be one line")
        return header

    @property
    def word(self) -> str:
        """What every line of an erratum begins with, before its number."""
        return self.header.partition("{revision}")[0].strip()


class Profile(BaseModel):
    """A measured choice for one model and template, or the generic default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    name: str = "generic"
    wording: Wording = Wording()
    carriers: tuple[Carrier, ...] = (
        Carrier.SYSTEM_BEFORE,
        Carrier.USER_BEFORE,
        Carrier.FOLDED_BEFORE,
    )
    """Where an erratum goes beside a user message: the first that the template takes."""
    tool_carriers: tuple[Carrier, ...] = (Carrier.TOOL, Carrier.FOLDED_TOOL)
    """Where it goes after a round of tool results."""
    restate: Restate = Restate.TOUCHED
    snapshot_every: int = Field(default=16, ge=1)
    """Every so-manieth erratum is a snapshot."""
    max_superseded: int = Field(default=24, ge=1)
    """Most superseded values of one field in the context; one more opens a new epoch."""
    max_errata_share: float = Field(default=0.25, gt=0, le=1)
    """Most of the context window that errata may take; beyond it a new epoch is opened."""
    max_statement_chars: int = Field(default=2000, ge=80)
    """A longer value is said as the part that changed, with its length and digest."""
    obedience: float | None = Field(default=None, ge=0, le=1)
    """Measured share of errata that the model acts on; None if not measured."""
    critical_obedience: float = Field(default=0.9, ge=0, le=1)
    """Critical fields open a new epoch where `obedience` is below this or unknown."""


GENERIC: Final = Profile()
