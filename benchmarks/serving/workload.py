"""What is asked and what is true: single requests, conversations of agents, and when requests arrive."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentkv.tokenizer import ChatTokenizer
from benchmarks._arms import Case
from benchmarks._workload import LABELS, VALUES, make_case

EARLY: Final = "case.status"
"""The field of which each single request has another value: the first one of the prompt."""
ROOM: Final = 100
"""About so many tokens a request puts behind the warmed beginning; with the whole state it is more."""
WARM_QUESTION: Final = "Good morning. Who is responsible for this case?"
_WORDS: Final = (
    " please",
    " now",
    " then",
    " again",
    " here",
    " there",
    " today",
    " also",
    " just",
    " still",
)
_DAY_S: Final = 24 * 3600
_STRIDE_S: Final = 7919
"""A prime, so that the times of day differ for as many requests as a day has seconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is true and what is asked in one request."""

    values: Mapping[str, str]
    question: str


def case_of(tokenizer: ChatTokenizer, asked_tokens: int, answer_tokens: int) -> Case:
    """Return a case of which a request's whole prompt has about `asked_tokens` tokens."""
    return make_case(tokenizer, asked_tokens - ROOM, answer_tokens)


class Jobs:
    """Single requests without end: no two have the same value or question.

    The questions grow by one token from each to the next, and begin anew after a block, so that the prompts'
    lengths cover every residue of the block.
    """

    def __init__(self, tokenizer: ChatTokenizer, block: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._block = block
        self._base = random.Random(seed).randrange(_DAY_S)  # noqa: S311 - a workload, not a secret
        self._made: list[Job] = []

    def take(self, start: int, count: int) -> list[Job]:
        """Return the requests from the number `start` on."""
        while len(self._made) < start + count:
            self._made.append(self._job(len(self._made)))
        return self._made[start : start + count]

    def _job(self, number: int) -> Job:
        first = {key: values[0] for key, values in VALUES.items()}
        value = f"open since {_clock(self._base + number * _STRIDE_S)}"
        return Job(first | {EARLY: value}, self._question(number))

    def _question(self, number: int) -> str:
        # The number stands first: two questions have next to nothing in common.
        ask = f": what is the {LABELS[EARLY].lower()}"
        text = f"{number:05d}{ask}"
        wanted = len(self._tokenizer.encode(f"{0:05d}{ask}")) + number % self._block
        place = 0
        while len(self._tokenizer.encode(text)) < wanted:
            words = (*_WORDS[place:], *_WORDS[:place], ".")
            longer = (text + word for word in words)
            found = next((one for one in longer if len(self._tokenizer.encode(one)) <= wanted), None)
            if found is None:
                break
            text, place = found, (place + 1) % len(_WORDS)
        return text


def _clock(second: int) -> str:
    second %= _DAY_S
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return when requests arrive in seconds, the first at 0: a Poisson process of so many a second."""
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += chance.expovariate(rate)
    return times


def agent_jobs(agents: int, turns: int, seed: int) -> list[list[Job]]:
    """Return the turns of each agent; before each, one of its fields changes with a probability of 0.5."""
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    made = []
    for agent in range(agents):
        values = {key: options[0] for key, options in VALUES.items()}
        talk = []
        for turn in range(turns):
            key = chance.choice(list(VALUES))
            if chance.random() < 0.5:
                values[key] = chance.choice([value for value in VALUES[key] if value != values[key]])
            question = f"{agent}-{turn}: what is the {LABELS[key].lower()} of this case?"
            talk.append(Job(dict(values), question))
        made.append(talk)
    return made
