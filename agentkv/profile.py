"""How errata are worded, carried and repeated for one model and chat template."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentkv.entries import Carrier
from agentkv.errors import ProfileError


class Restate(StrEnum):
    """When a standing erratum is said again although nothing changed."""

    NEVER = "never"
    TOUCHED = "touched"
    """When the user's message holds more than half of the words of the field's label."""
    ALWAYS = "always"


class _Checked(BaseModel):
    """A model whose validation errors are `ProfileError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise profile_error(error) from error


def profile_error(error: ValidationError) -> ProfileError:
    """Return what is wrong with a profile, in one line."""
    wrong = error.errors(include_url=False)[0]
    place = ".".join(map(str, wrong["loc"])) or "the profile"
    return ProfileError(f"{place}: {wrong['msg']} (given: {wrong['input']!r})")


class Wording(_Checked):
    """Sentences with ``{revision}``, ``{label}``, ``{old}`` and ``{new}``.

    Raises
    ------
    ProfileError
        A sentence lacks one of its placeholders, has another or is not one line, or the announcement does
        not hold the word that errata begin with.
    """

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
    replaced: str = "the {label} is replaced by the one above."
    """For a segment or tool whose text or schema is another than the one told."""
    line: str = "{label}: {new}"
    """One field of a snapshot, or of an erratum that states many."""

    @field_validator("header")
    @classmethod
    def _numbered(cls, header: str) -> str:
        word, found, _ = header.partition("{revision}")
        if not found or not any(c.isalpha() for c in word):
            raise ValueError("the header needs a word and then {revision}")
        return header

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, wanted in _PLACEHOLDERS.items():
            sentence: str = getattr(self, name)
            try:
                parsed = list(string.Formatter().parse(sentence))
            except ValueError as error:
                raise ValueError(f"{name} {sentence!r}: {error}") from error
            found = {
                key for _, key, form, conversion in parsed if key is not None and not (form or conversion)
            }
            if found != wanted or len(sentence.splitlines()) != 1:
                names = " and ".join(f"{{{key}}}" for key in sorted(wanted))
                raise ValueError(
                    f"{name} {sentence!r} has to be one line with {names} and no other placeholder"
                )
        letters = "".join(c for c in self.word if c.isalnum() or c.isspace()).strip()
        if letters.casefold() not in self.announcement.casefold():
            raise ValueError(f"the announcement does not hold {letters!r}, which errata begin with")
        return self

    @cached_property
    def phrases(self) -> tuple[str, ...]:
        """Runs of two words or more that statements are made of."""
        texts = (self.changed, self.fresh, self.gone, self.voided, self.replaced)
        pieces = (literal for text in texts for literal, _, _, _ in string.Formatter().parse(text))
        return tuple(dict.fromkeys(piece for piece in pieces if len(re.findall(r"\w+", piece)) > 1))

    @property
    def word(self) -> str:
        """What every line of an erratum begins with, before its number."""
        return self.header.partition("{revision}")[0].strip()


_PLACEHOLDERS: Final[Mapping[str, frozenset[str]]] = {
    "header": frozenset({"revision"}),
    "changed": frozenset({"label", "old", "new"}),
    "fresh": frozenset({"label", "new"}),
    "gone": frozenset({"label"}),
    "voided": frozenset({"labels"}),
    "replaced": frozenset({"label"}),
    "line": frozenset({"label", "new"}),
}


class Profile(_Checked):
    """A measured choice for one model and template, or the generic default.

    Raises
    ------
    ProfileError
        A value is out of range or of the wrong kind.
    """

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
