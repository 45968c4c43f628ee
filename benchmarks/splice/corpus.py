"""The texts: skills with facts and questions, beginnings of prompts, and filler of any length."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks._workload import ACTIONS, EVENTS

_DATA: Final = Path(__file__).parent / "data"
_PREFIXES: Final = "prefixes.toml"
_SUBJECTS: Final = (
    "a parcel",
    "a refund",
    "an exchange",
    "an invoice",
    "a repair",
    "a complaint",
    "a voucher",
)
_PADDING: Final = (" so", " and", " then", " now", ".", "!")


class Encodes(Protocol):
    """What is needed to count tokens."""

    def chunk(self, text: str) -> Sequence[int]:
        """Return the ids of a text that stands alone."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """Something that a skill answers."""

    ask: str
    answers: tuple[str, ...]
    """Forms of the fact, one of which a right answer holds."""


@dataclass(frozen=True, slots=True)
class SkillText:
    """A skill with plain facts in it."""

    name: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class PrefixText:
    """The beginning of a prompt that no skill was compiled behind."""

    name: str
    text: str
    anchor: str
    """Another text of the same kind."""


def skills() -> list[SkillText]:
    """Return all skills, by file name."""
    return [
        SkillText(found["name"], found["text"].strip(), tuple(map(_question, found["questions"])))
        for found in (_read(path) for path in sorted(_DATA.glob("*.toml")) if path.name != _PREFIXES)
    ]


def prefixes() -> list[PrefixText]:
    """Return all beginnings of prompts."""
    return [
        PrefixText(found["name"], found["text"].strip(), found["anchor"].strip())
        for found in _read(_DATA / _PREFIXES)["prefix"]
    ]


def filler(encoder: Encodes, tokens: int, seed: int) -> str:
    """Return a text of exactly `tokens` tokens; another seed gives another one.

    Raises
    ------
    ValueError
        No text of this many tokens was found.
    """
    lines = _rules(seed)
    text = f"Rule book {seed + 1}"
    parts = [text]
    while len(encoder.chunk("\n".join(parts))) < tokens:
        parts.append(next(lines))
    text = "\n".join(parts)
    while len(encoder.chunk(text)) > tokens:
        text = text[: text.rstrip().rfind(" ")].rstrip()
    for _ in range(tokens):
        short = tokens - len(encoder.chunk(text))
        if short == 0:
            return text
        longer = (text + word for word in _PADDING)
        text = next((one for one in longer if 0 <= tokens - len(encoder.chunk(one)) < short), text)
    raise ValueError(f"no filler of exactly {tokens} tokens was found with this tokenizer")


def _rules(seed: int) -> Iterator[str]:
    chance = random.Random(seed)  # noqa: S311 - a text, not a secret
    number = 0
    while True:
        number += 1
        subject, event, action = (chance.choice(words) for words in (_SUBJECTS, EVENTS, ACTIONS))
        days, other = chance.randrange(2, 60), chance.randrange(1, number + 1)
        rule = f"When {subject} {event}, {action} within {days} days"
        yield f"{number}. {rule}, unless rule {other} says otherwise."


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _question(found: dict[str, Any]) -> Question:
    return Question(found["ask"], tuple(found["answers"]))
