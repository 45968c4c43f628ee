"""What tokens cost on this backend, measured while it runs, and when a rebase pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from agentkv.backends.base import Completion
from agentkv.errors import ConfigurationError

_ERRORS: Final = 3.0
"""Standard errors by which the slope may be too large."""
_LEAST_RATIO: Final = 100.0
"""To read a token's KV once costs at most this part of computing it: both run over the same layers, and a
token's KV is hundreds of times smaller than the weights that computing it passes through."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Running estimates in seconds; nothing is assumed before something was measured.

    The cost of a standing token is the slope of the decode time of one token over the length of the
    context, by least squares over the calls so far; of what it may be the least is taken, three standard
    errors below, because on a busy server other calls make it anything. What one context measured
    (`AgentKVContext.costs`) can be handed to another on the same backend, as its ``costs=``.
    """

    prefill_s: float | None = None
    """Seconds per prefilled token, over calls that prefilled at least 64 and loaded nothing."""
    splice_s: float | None = None
    """Seconds per loaded token, over calls that loaded at least 64, priming and first token included."""
    turns_ahead: int = 20
    """How many more calls a conversation is expected to make."""
    calls: int = 0
    prefilled: int = 0
    prefill_seconds: float = 0.0
    spliced: int = 0
    splice_seconds: float = 0.0
    answer_tokens: float = 0.0
    """Mean length of an answer in tokens."""
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0
    sum_yy: float = 0.0

    def __post_init__(self) -> None:
        if self.turns_ahead < 0:
            raise ConfigurationError(f"turns_ahead is {self.turns_ahead}; give 0 or more calls")

    def observe(self, completion: Completion) -> Costs:
        """Return the estimates with one more call taken into account."""
        usage = completion.usage
        made = replace(self)
        if usage.spliced_tokens >= 64:
            spliced = self.spliced + usage.spliced_tokens
            loading = completion.ttft_s - usage.computed_tokens * (self.prefill_s or 0.0)
            seconds = self.splice_seconds + max(0.0, loading)
            made = replace(made, spliced=spliced, splice_seconds=seconds, splice_s=seconds / spliced)
        elif usage.computed_tokens >= 64:
            prefilled = self.prefilled + usage.computed_tokens
            seconds = self.prefill_seconds + completion.ttft_s
            made = replace(made, prefilled=prefilled, prefill_seconds=seconds, prefill_s=seconds / prefilled)
        decoded = usage.generated_tokens - 1
        if decoded < 1:
            return made
        x = float(usage.prompt_tokens + decoded / 2)
        y = (completion.duration_s - completion.ttft_s) / decoded
        calls = self.calls + 1
        return replace(
            made,
            calls=calls,
            answer_tokens=self.answer_tokens + (usage.generated_tokens - self.answer_tokens) / calls,
            sum_x=self.sum_x + x,
            sum_y=self.sum_y + y,
            sum_xx=self.sum_xx + x * x,
            sum_xy=self.sum_xy + x * y,
            sum_yy=self.sum_yy + y * y,
        )

    @property
    def standing_s(self) -> float | None:
        """Seconds that one token standing in the context adds to each decoded token; None if unknown."""
        n = self.calls
        if n < 8:
            return None
        sxx = self.sum_xx - self.sum_x**2 / n
        if sxx <= 0:
            return None
        sxy = self.sum_xy - self.sum_x * self.sum_y / n
        syy = self.sum_yy - self.sum_y**2 / n
        slope = sxy / sxx
        error = math.sqrt(max(0.0, syy - slope * sxy) / (n - 2) / sxx)
        least = max(0.0, slope - _ERRORS * error)
        return least if self.prefill_s is None else min(least, self.prefill_s / _LEAST_RATIO)

    def splice_pays(self, tokens: int) -> bool:
        """Whether loading tokens costs less than computing them; assumed until both were measured."""
        if self.splice_s is None or self.prefill_s is None:
            return tokens > 0
        return tokens > 0 and self.splice_s < self.prefill_s

    def rebase_pays(self, standing_tokens: int, rebased_tokens: int) -> bool:
        """Whether carrying errata costs more over the turns ahead than one rebase.

        Parameters
        ----------
        standing_tokens
            Tokens of errata in the context, the one about to be said included.
        rebased_tokens
            Tokens that a rebase would prefill.
        """
        standing_s = self.standing_s
        if standing_s is None or self.prefill_s is None:
            return False
        carried = standing_tokens * standing_s * self.answer_tokens * self.turns_ahead
        return carried > rebased_tokens * self.prefill_s
