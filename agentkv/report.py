"""What a turn cost, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentkv.kv.refusals import Refusal
from agentkv.miss import Miss
from agentkv.plan import Plan, Rebase, describe


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn: predicted against observed, and what was said."""

    turn: int
    """Counts from 1."""
    epoch: int
    plan: Plan = field(repr=False)
    erratum: str = field(repr=False)
    """Text of the turn's errata; empty if nothing was said."""
    revision: int
    """Revision of the last erratum so far."""
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens that neither the previous prompt nor its answer held."""
    predicted_cached_tokens: int
    cached_tokens: int
    """Observed: reused from an exact prefix."""
    spliced_tokens: int
    computed_tokens: int
    """Observed: prefilled."""
    generated_tokens: int
    ttft_s: float
    """Seconds to the first token."""
    duration_s: float
    miss: Miss | None
    """Why the cache did not hold everything that was sent before, or None if it did."""
    broken_by: str
    """The segments or fields that rewrote the prefix; empty if none did."""
    would_have_cached_tokens: int | None = None
    """In mode ``observe``: what agentkv would have had in the cache."""
    predicted_spliced_tokens: int = 0
    """Tokens that were to be loaded, if the cache held what was predicted and no more."""
    refused: tuple[tuple[str, Refusal], ...] = ()
    """Segments that were computed although they might have been loaded, and why."""
    corrected: tuple[str, ...] = ()
    """Keys of fields of which a rebase's summary held an earlier value; the erratum states what is true."""

    def __str__(self) -> str:
        text = (
            f"turn {self.turn}: {describe(self.plan)}; {self.prompt_tokens} prompt tokens, "
            f"{self.cached_tokens} cached (predicted {self.predicted_cached_tokens}), "
            f"{self._spliced()}{self.computed_tokens} computed, first token after {self.ttft_s:.3f} s"
        )
        if self.miss is not None:
            text += f"; {self.miss.value}" + (f" ({self.broken_by})" if self.broken_by else "")
        if self.refused:
            text += "; computed instead of spliced: " + ", ".join(
                f"{key} ({why.value})" for key, why in self.refused
            )
        if self.corrected:
            text += f"; outdated in the summary: {', '.join(self.corrected)}"
        return text

    def _spliced(self) -> str:
        if not self.spliced_tokens and not self.predicted_spliced_tokens:
            return ""
        return f"{self.spliced_tokens} spliced (predicted {self.predicted_spliced_tokens}), "


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A conversation so far, summed up."""

    turns: int = 0
    epochs: int = 0
    errata: int = 0
    """Turns that said something."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spliced_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    """Seconds to the first token, summed over all turns."""
    mispredicted: int = 0
    """Turns in which less was cached than predicted. What other calls put into the cache, and turns whose
    cached tokens are not known, do not count."""
    would_have_cached_tokens: int = 0
    """In mode ``observe``: cached tokens that agentkv would have had, summed."""
    last: TurnReport | None = None

    def __str__(self) -> str:
        return (
            f"{self.turns} turns, {self.epochs} epochs opened, {self.errata} errata; "
            f"{self.prompt_tokens} prompt tokens, {self.cached_share:.1%} cached"
            f"{f', {self.spliced_tokens} spliced' if self.spliced_tokens else ''}; "
            f"{self.ttft_s:.3f} s to first tokens; {self.mispredicted} turns not as predicted"
        )

    @property
    def cached_share(self) -> float:
        """Cached tokens over prompt tokens; 0 before the first turn."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, turn: TurnReport) -> SessionReport:
        """Return the sums with one more turn."""
        return replace(
            self,
            turns=self.turns + 1,
            epochs=self.epochs + any(isinstance(operation, Rebase) for operation in turn.plan),
            errata=self.errata + bool(turn.erratum),
            prompt_tokens=self.prompt_tokens + turn.prompt_tokens,
            cached_tokens=self.cached_tokens + turn.cached_tokens,
            spliced_tokens=self.spliced_tokens + turn.spliced_tokens,
            computed_tokens=self.computed_tokens + turn.computed_tokens,
            generated_tokens=self.generated_tokens + turn.generated_tokens,
            ttft_s=self.ttft_s + turn.ttft_s,
            mispredicted=self.mispredicted + _mispredicted(turn),
            would_have_cached_tokens=self.would_have_cached_tokens + (turn.would_have_cached_tokens or 0),
            last=turn,
        )


def _mispredicted(turn: TurnReport) -> bool:
    differs = turn.cached_tokens != turn.predicted_cached_tokens
    return differs and turn.miss not in (Miss.SHARED, Miss.UNREPORTED, Miss.UNPREDICTED)
