"""What is true, what is asked, and what a tool finds out: the same for every arm."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from agentkv import Inline
from agentkv.backends.plain import PlainTokenizer
from benchmarks._arms import ELSEWHERE
from benchmarks._workload import LABELS, VALUES, make_case

FIRST: Final[Mapping[str, str]] = {key: options[0] for key, options in VALUES.items()}
Topic = Literal["parcel", "payment", "pickup"]
"""What the tool is asked about: a closed list, so that a small model's call is a valid one."""


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn."""

    number: int
    """From 1."""
    question: str
    asked: str
    """Key of the field that is asked for."""
    before: Mapping[str, str]
    """What is true when the question comes."""
    after: Mapping[str, str]
    """What is true once the tool was called; the same if it finds nothing new."""
    calls_tool: bool
    changed: str | None
    """Key of the field that changes, before the question or by the tool; every other turn has one."""
    old_value: str | None = None
    """What the changed field was before."""

    @property
    def new_value(self) -> str:
        """What the answer has to state."""
        return self.after[self.asked]


def make_turns(count: int, seed: int) -> list[AgentTurn]:
    """Return turns in which one field changes in every other one, and a tool is called in half of them.

    Of the changes every second one is made by the tool, the others are there before the question.
    """
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    values = dict(FIRST)
    turns = []
    for number in range(1, count + 1):
        key = chance.choice(list(VALUES))
        before, changed, old = dict(values), None, None
        if number % 2 == 0:
            changed, old = key, values[key]
            values[key] = chance.choice([value for value in VALUES[key] if value != old])
        calls = number % 4 in (3, 0)
        by_tool = calls and changed is not None
        ask = f"what is the {LABELS[key].lower()} of this case?"
        turns.append(
            AgentTurn(
                number=number,
                question=f"Ask the depot for news, then tell me: {ask}" if calls else ask.capitalize(),
                asked=key,
                before=before if by_tool else dict(values),
                after=dict(values),
                calls_tool=calls,
                changed=changed,
                old_value=old,
            )
        )
    return turns


def policy(tokens: int, answer_tokens: int) -> Inline:
    """Return a policy of about so many tokens with all fields near its top."""
    text = make_case(PlainTokenizer(), tokens, answer_tokens).segments[0].text
    if not isinstance(text, Inline):
        raise TypeError("the case's policy holds no fields")
    return text


def written(text: Inline, values: Mapping[str, str] | None) -> str:
    """Return a policy with values in it; without any where they are stated elsewhere."""
    shown = dict.fromkeys(text.keys, ELSEWHERE) if values is None else values
    return "".join(literal + ("" if key is None else shown[key]) for literal, key in text.parts)


def listed(values: Mapping[str, str]) -> str:
    """Return the whole state as text."""
    lines = "\n".join(f"- {label}: {values[key]}" for key, label in LABELS.items())
    return f"Current state:\n{lines}"


@dataclass(slots=True)
class World:
    """What is true now, and whether the agent has to call its tool in this turn."""

    values: Mapping[str, str] = field(default_factory=lambda: dict(FIRST))
    turn: AgentTurn | None = None

    def begin(self, turn: AgentTurn) -> None:
        """Go on to a turn."""
        self.turn, self.values = turn, turn.before

    def ask_depot(self) -> None:
        """Let happen what the tool finds out."""
        if self.turn is not None:
            self.values = self.turn.after
