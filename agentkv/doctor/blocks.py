"""The block size of a prefix cache, measured: only whole blocks are found again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agentkv.doctor.cache import Repeats, longest
from agentkv.doctor.findings import Outcome, ok, unchecked, warning
from agentkv.doctor.session import Session

Observation = tuple[int, int]
"""Length of a prompt whose blocks had all been computed, and how many of its tokens were cached."""

_MOST_QUERIES: Final = 4


def expected(length: int, block: int) -> int:
    """Return how many tokens of a prompt are found: whole blocks, and never the last token."""
    return (length - 1) // block * block


def smallest_block(observations: Iterable[Observation]) -> int | None:
    """Return the smallest block size that explains all observations.

    Returns
    -------
    int or None
        None where no size does, or nothing was cached.
    """
    seen = tuple(observations)
    most = max((cached for _, cached in seen), default=0)
    for block in range(1, most + 1):
        if all(expected(length, block) == cached for length, cached in seen):
            return block
    return None


def observe(session: Session, repeats: Repeats) -> tuple[Observation, ...]:
    """Ask for prefixes of a cached prompt, whose counts tell one block size from another.

    A prefix as long as what was cached loses exactly one block, as its last token is always computed.
    """
    tries = len(repeats.samples) if repeats.missed else 1

    def cached(length: int) -> int:
        prefix = repeats.prompt[:length]
        return max(session.send(prefix, repeats.salt).cached or 0 for _ in range(tries))

    first = repeats.cached
    seen: list[Observation] = [(len(repeats.prompt), first)]
    length = first
    while length > 1 and len(seen) < _MOST_QUERIES:
        found = cached(length)
        seen.append((length, found))
        length = found
    block = smallest_block(seen)
    if block is None:
        return tuple(seen)
    if first == block and 2 * block + 1 <= longest(session):
        # One block alone looks like any least length: a second one tells.
        prompt = (*repeats.prompt, *session.prompt(2 * block + 1))[: 2 * block + 1]
        sent = [session.send(prompt, repeats.salt).cached or 0 for _ in range(tries + 1)]
        seen.append((len(prompt), max(sent[1:])))
    return tuple(seen)


def block_size(session: Session, repeats: Repeats) -> Outcome:
    """What the block size is, and whether ``/metrics`` tells the same."""
    if repeats.cached > len(repeats.prompt):
        return unchecked("more tokens are cached than were sent")
    seen = observe(session, repeats)
    block, told = smallest_block(seen), session.cache.block_size
    counts = ", ".join(f"{cached} of {length}" for length, cached in seen)
    if block is None:
        return warning(
            f"no block size explains what was cached ({counts})",
            "give block_size= to VLLMBackend, the server's --block-size; predictions may be off",
        )
    if told is None:
        return ok(
            f"{block:,} tokens ({counts}); /metrics does not tell: give block_size={block} to VLLMBackend"
        )
    if told != block:
        return warning(
            f"{block:,} tokens ({counts}), but /metrics says {told:,}",
            f"give block_size={block} to VLLMBackend",
        )
    return ok(f"{block:,} tokens, as /metrics says ({counts})")
