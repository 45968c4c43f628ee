"""Checks of the prefix cache: whether it is on, told of, kept apart by salts, and one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentkv.doctor.findings import Outcome, failed, ok, unchecked, warning
from agentkv.doctor.session import ROUTING_HEADER, Lengths, Sample, Session, salt

_SENDS: Final = 6
"""Enough to see requests rotate over a few replicas."""
_SHORT: Final = (97, 193, 641)
_LONG: Final = (1_301, 2_601, 4_201)
_ON_FIX: Final = "start vLLM with --enable-prefix-caching (and without --no-enable-prefix-caching)"
_LARGE_FIX: Final = "add --measure-large: blocks of hybrid models are 528 to 2,096 tokens"


@dataclass(frozen=True, slots=True)
class Repeats:
    """One prompt, sent several times under one salt."""

    prompt: tuple[int, ...]
    salt: str
    samples: tuple[Sample, ...]

    @property
    def told(self) -> bool:
        """Whether cached tokens are told."""
        return any(sample.cached is not None for sample in self.samples)

    @property
    def cached(self) -> int:
        """Most tokens that a repetition found."""
        return max((sample.cached or 0 for sample in self.samples[1:]), default=0)

    @property
    def missed(self) -> int:
        """Repetitions that found nothing, although others did."""
        return sum(not sample.cached for sample in self.samples[1:]) if self.cached else 0


@dataclass(frozen=True, slots=True)
class Partition:
    """What a prompt that is cached under one salt finds elsewhere."""

    other: int
    """Cached tokens under another salt."""
    none: int
    """Cached tokens without a salt."""


def longest(session: Session) -> int:
    """Return the length of the longest prompt that may be tried, in tokens."""
    return lengths(session)[-1]


def lengths(session: Session) -> Sequence[int]:
    """Return the lengths of prompts to try, in tokens, as far as the context reaches."""
    wanted = _SHORT + (_LONG if session.asked.lengths is Lengths.LONG else ())
    window = session.model.context_window
    fitting = [length for length in wanted if window is None or length + 8 <= window]
    return fitting or [max(2, (window or 0) - 8)]


def repeat(session: Session) -> Repeats:
    """Repeat a prompt, and a longer one as long as nothing of it is found."""
    made = Repeats((), "", ())
    for number, length in enumerate(lengths(session)):
        made = _repeated(session, length, _SENDS if number == 0 else 3)
        if made.cached or not made.told or session.cache.enabled is False:
            break
    return made


def _repeated(session: Session, length: int, times: int) -> Repeats:
    prompt, salted = session.prompt(length), salt()
    samples: list[Sample] = []
    for _ in range(times):
        samples.append(session.send(prompt, salted))
        if len(samples) == 2 and not Repeats(prompt, salted, tuple(samples)).told:
            break
    return Repeats(prompt, salted, tuple(samples))


def details(repeats: Repeats, session: Session) -> Outcome:
    """Whether the server tells how many tokens were cached."""
    if repeats.told:
        return ok("cached tokens are told")
    if session.cache.enabled is False:
        return unchecked("nothing is cached, so nothing could be told of it", _ON_FIX)
    return failed(
        "the usage of an answer does not tell cached tokens",
        "start vLLM with --enable-prompt-tokens-details; a gateway has to pass prompt_tokens_details on",
    )


def caching(repeats: Repeats, session: Session) -> Outcome:
    """Whether a repeated prompt is found in the cache."""
    prompt = repeats.samples[0].prompt_tokens or len(repeats.prompt)
    if repeats.cached:
        return ok(f"{repeats.cached:,} of {prompt:,} tokens of a repeated prompt were cached")
    if session.cache.enabled is False:
        return failed("off, as /metrics says, and nothing of a repeated prompt was cached", _ON_FIX)
    if not repeats.told:
        return unchecked("cached tokens are not told")
    block = session.cache.block_size
    larger = session.asked.lengths is Lengths.SHORT
    if larger and block is not None and block >= longest(session):
        return unchecked(f"a block is {block:,} tokens, as /metrics says: more than was sent", _LARGE_FIX)
    return failed(
        f"nothing of a repeated prompt of {prompt:,} tokens was cached",
        f"{_ON_FIX}; or {_LARGE_FIX}" if larger else _ON_FIX,
    )


def partition(session: Session, repeats: Repeats) -> Partition:
    """Send a cached prompt under another salt, and under none."""
    other, none = (session.send(repeats.prompt, salted).cached or 0 for salted in (salt(), None))
    return Partition(other, none)


def salts(found: Partition) -> Outcome:
    """Whether salts keep requests apart."""
    if not (found.other or found.none):
        return ok("a prompt that is cached under one salt is found neither under another nor without one")
    where = "under another salt" if found.other else "without a salt"
    return failed(
        f"{found.other or found.none:,} tokens that were cached under one salt were found {where}",
        "let the gateway pass cache_salt on, and use vLLM 0.9 or newer: now tenants share what is cached",
    )


def replicas(repeats: Repeats, session: Session) -> Outcome:
    """Whether several caches answer at the address."""
    engines = session.cache.engines
    seen = f"{repeats.missed} of {len(repeats.samples) - 1} repetitions of a cached prompt found nothing"
    if repeats.missed:
        return warning(
            f"requests rotate over replicas, although {ROUTING_HEADER} was sent: {seen}",
            f"let the router keep requests of one {ROUTING_HEADER} on one replica, or name the header that "
            "it goes by as VLLMBackend(routing_header=...)",
        )
    if engines > 1:
        return warning(
            f"{engines} engines, each with a cache of its own, answer at this address; {seen}",
            "start one server for each engine and a router in front that goes by a header, so that a "
            "conversation stays where its prefix is",
        )
    return ok(f"one cache answers: {seen}")
