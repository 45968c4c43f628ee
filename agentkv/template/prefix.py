"""The append-only check: a prompt must begin with the one before it and the answer in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class BreakPlace(StrEnum):
    """In which part the two sequences part."""

    PROMPT = "prompt"
    """Inside the previous prompt."""
    GENERATED = "generated"
    """Inside the answer to it."""


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """The first id at which a prompt is not an extension of the one before."""

    index: int
    """Position in the next prompt; as many leading ids are shared."""
    expected: int
    """The id that was sent or generated there."""
    found: int | None
    """The id that stands there now; None if the next prompt ends before."""
    where: BreakPlace


def prefix_violation(
    previous_prompt_ids: Sequence[int], generated_ids: Sequence[int], next_prompt_ids: Sequence[int]
) -> PrefixBreak | None:
    """Find where `next_prompt_ids` stops beginning with the previous prompt and its answer.

    Returns
    -------
    PrefixBreak or None
        None if the next prompt is append-only.
    """
    boundary = len(previous_prompt_ids)
    sent = [*previous_prompt_ids, *generated_ids]
    for index, expected in enumerate(sent):
        found = next_prompt_ids[index] if index < len(next_prompt_ids) else None
        if found != expected:
            where = BreakPlace.PROMPT if index < boundary else BreakPlace.GENERATED
            return PrefixBreak(index, expected, found, where)
    return None
