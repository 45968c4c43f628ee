"""Which tokens of a prompt one request can load: pure functions over its splices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentkv.kv.protocol import SpliceSpec
from vllm_agentkv.work import Piece


def run_from(splices: Sequence[SpliceSpec], computed: int, limit: int) -> tuple[Piece, ...]:
    """Return what can be loaded right behind the cached tokens: one gapless run of pieces, or none.

    Parameters
    ----------
    splices
        Usable ones, sorted by start.
    computed
        Tokens of the prompt that are cached; a run has to begin here, inside a splice.
    limit
        Tokens of the prompt that may be there without being computed: at least the last one is computed.
    """
    run: list[Piece] = []
    at = computed
    for splice in splices:
        if splice.stop <= at:
            continue
        if splice.start > at or at >= limit:
            break
        stop = min(splice.stop, limit)
        run.append(Piece(splice.artifact, at, stop, splice.offset + at - splice.start))
        at = stop
    return tuple(run)


def ends_at(run: Sequence[Piece], computed: int) -> int:
    """Tokens that are there once `run` is loaded behind `computed` ones."""
    return run[-1].stop if run else computed


def beyond(splices: Iterable[SpliceSpec], position: int) -> list[SpliceSpec]:
    """Splices that begin behind `position`: loading them takes a cached prefix that reaches their start."""
    return [splice for splice in splices if splice.start > position]


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots in the paged cache of a request's tokens ``[start, stop)``."""
    return [blocks[at // block_size] * block_size + at % block_size for at in range(start, stop)]
