"""What the scheduler's half keeps of each request that carries a word for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentkv.kv import Refusal
from agentkv.kv.protocol import Asked, Compiled, HelloAnswer, Outcome, Refused, Splices, SpliceSpec
from vllm_agentkv.shelf import Sound
from vllm_agentkv.work import Chunk

if TYPE_CHECKING:
    from vllm.v1.request import Request

Answer = HelloAnswer | Compiled | Asked | Refused


@dataclass(slots=True)
class SpliceJob:
    """A prompt of a call with splices."""

    request: Request
    asking: Splices
    wanted: tuple[SpliceSpec, ...]
    """Splices within this prompt; of a prime's, those whose seam it computes are left out."""
    arrived: float = field(default_factory=time.monotonic)
    usable: dict[SpliceSpec, Sound] = field(default_factory=dict)
    """Splices that were checked and may be loaded."""
    refused: dict[SpliceSpec, Refusal] = field(default_factory=dict)
    local: int = 0
    """Tokens that the prefix cache held when it was asked last."""
    loaded: int = 0
    """Tokens that are loaded behind them."""
    admitted: bool = False
    """Whether it was scheduled; what was refused is counted then."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def is_prime(self) -> bool:
        """Whether the prompt only prepares another one of its call."""
        return self.length in self.asking.primes

    @property
    def open(self) -> list[SpliceSpec]:
        """Splices that are neither usable nor refused yet."""
        return [one for one in self.wanted if one not in self.usable and one not in self.refused]

    def outcome(self) -> Outcome:
        """Say what became of it."""
        return Outcome(
            prompt=self.length,
            local=self.local,
            loaded=self.loaded,
            refused=tuple((splice.artifact, self.refused[splice]) for splice in self.wanted
                          if splice in self.refused),
        )  # fmt: skip


@dataclass(slots=True)
class CompileJob:
    """A prompt whose end is to be kept as an artifact."""

    request: Request
    chunk: Chunk
    artifact: str
    """Name that it will have."""
    answer: Compiled | Refused | None = None
    """Known once it is written, or cannot be."""


@dataclass(slots=True)
class TalkJob:
    """A request that only wants an answer."""

    answer: HelloAnswer | Refused | None = None
    call: str | None = None
    """For `Ask`: answered at the end, when the call's prompts are through."""
    have: tuple[str, ...] = ()


Job = SpliceJob | CompileJob | TalkJob
