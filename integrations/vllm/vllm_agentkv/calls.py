"""What became of the prompts of each call, for as long as a client may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from agentkv.kv.protocol import Outcome

_CALLS: Final = 4096
_OUTCOMES: Final = 256
_ARRIVAL_S: Final = 1.0
"""A prime comes with the same HTTP call: one that is not there by now was never sent."""
_TOGETHER_S: Final = 0.05
"""Longest that a prime waits for the prompt it came with, so that one step computes both."""
_HOLD_S: Final = 60.0
"""Longest that a prompt waits for primes which came and are not computed."""


@dataclass(slots=True)
class Call:
    """One call: its primes, by their lengths, and the outcomes of its prompts."""

    began: float = field(default_factory=time.monotonic)
    arrived: set[int] = field(default_factory=set)
    """Primes that came."""
    main: bool = False
    """Whether the prompt that they prepare came."""
    done: set[int] = field(default_factory=set)
    """Primes whose blocks can be hit from now on, or will never be."""
    outcomes: list[Outcome] = field(default_factory=list)

    def awaits(self, primes: Iterable[int], prompt: int) -> bool:
        """Tell whether a prompt of `prompt` tokens should wait for primes of the call."""
        waited = time.monotonic() - self.began
        for prime in primes:
            if prime >= prompt or prime in self.done:
                continue
            if waited < (_HOLD_S if prime in self.arrived else _ARRIVAL_S):
                return True
        return False

    def gathers(self) -> bool:
        """Tell whether a prime should wait for the prompt that it came with."""
        return not self.main and time.monotonic() - self.began < _TOGETHER_S

    def close(self, outcome: Outcome) -> None:
        """Keep a prompt's outcome."""
        if len(self.outcomes) < _OUTCOMES:
            self.outcomes.append(outcome)


class Calls:
    """The latest calls, by their ids."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def get(self, name: str) -> Call:
        """Return a call, begun now if it is a new one."""
        call = self._calls.setdefault(name, Call())
        self._calls.move_to_end(name)
        while len(self._calls) > _CALLS:
            self._calls.popitem(last=False)
        return call

    def outcomes(self, name: str) -> tuple[Outcome, ...]:
        """Return the outcomes of a call; none if it is unknown or forgotten."""
        call = self._calls.get(name)
        return tuple(call.outcomes) if call is not None else ()
