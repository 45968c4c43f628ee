"""How much is measured in each profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """A few minutes."""
    FULL = "full"
    """Skills of up to 7,680 tokens, and 200 probes."""


class Engine(StrEnum):
    """What runs the model where times are measured."""

    TRANSFORMERS = "transformers"
    """A model in this process."""
    VLLM = "vllm"
    """A server."""


class Part(StrEnum):
    """What is measured."""

    TTFT = "ttft"
    """One skill of several sizes."""
    SKILLS = "skills"
    """Several skills in one prompt."""
    APPEND = "append"
    """A skill added in mid-conversation."""
    FIDELITY = "fidelity"
    """Logits and answers against a full prefill, on a model in this process."""


class Anchoring(StrEnum):
    """What a skill was compiled behind."""

    NONE = "none"
    GENERIC = "generic"
    """`agentkv.anchor.ANCHOR`."""
    OWN = "own style"
    """Another text of the same kind as the prompt's beginning."""


DEFAULT_SEAM: Final = 16
DEFAULT_ANCHORING: Final = Anchoring.GENERIC
SEAMS: Final = (0, 1, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """How many probes: each skill behind each prefix, with each question."""

    skills: int
    prefixes: int
    questions: int
    """Of each skill."""
    seams: tuple[int, ...] = SEAMS
    anchorings: tuple[Anchoring, ...] = tuple(Anchoring)

    @property
    def probes(self) -> int:
        """Number of probes."""
        return self.skills * self.prefixes * self.questions


@dataclass(frozen=True, slots=True)
class Plan:
    """What a profile measures."""

    sizes: tuple[int, ...]
    """Tokens of the one skill in a prompt."""
    samples: int
    """Of each time."""
    counts: tuple[int, ...]
    """Numbers of skills in a prompt."""
    each_tokens: int
    """Tokens of each of several skills."""
    probes: ProbePlan
    append_samples: int
    before_tokens: int = 4000
    """About so many are cached before a skill is added."""
    added_tokens: int = 2048
    """Tokens of the skill that is added."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest skills of one prompt together."""
        return max(*self.sizes, max(self.counts) * self.each_tokens, self.added_tokens)


PLANS: Final[Mapping[Profile, Plan]] = {
    Profile.QUICK: Plan(
        sizes=(512, 1024, 2048),
        samples=1,
        counts=(1, 2),
        each_tokens=256,
        probes=ProbePlan(skills=2, prefixes=2, questions=3),
        append_samples=1,
    ),
    Profile.FULL: Plan(
        sizes=(512, 1024, 2048, 4096, 7680),
        samples=3,
        counts=(1, 2, 4, 8),
        each_tokens=512,
        probes=ProbePlan(skills=8, prefixes=5, questions=5),
        append_samples=3,
    ),
}
