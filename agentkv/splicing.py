"""Which parts of a prompt can be loaded from artifacts instead of prefilled, and where they stand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from agentkv.backends.base import Backend, Splicer, SpliceSpec
from agentkv.costs import Costs
from agentkv.entries import Frozen, LedgerEntry, SegmentAdded
from agentkv.errors import AgentKVError, CapabilityError, ConfigurationError
from agentkv.kv.refusals import Refusal
from agentkv.plan import Operation, Prime, Splice
from agentkv.prompt import Prompt
from agentkv.segments import Document, Skill, Splicing
from agentkv.template import TemplateEncoder
from agentkv.tokens import TokenIds

_LOG: Final = logging.getLogger("agentkv")
EDGE: Final = 4
"""Tokens at each end of a chunk that may be others in a prompt, where they merge with the text around it."""
SEAM: Final = 16
"""Leading tokens of a chunk that are computed for real, unless a backend is told otherwise."""
_LEAST: Final = 32
"""Fewer tokens than this are not worth a splice."""
_SPLICEABLE: Final = ("skill:", "document:")


@dataclass(frozen=True, slots=True)
class Shelf:
    """The artifacts that a backend has for a tenant, and how they are used."""

    find: Callable[[Sequence[int], Splicing], str | None]
    """Returns the name of the artifact of exactly these tokens, if there is one or if it was to be made."""
    seam: int
    """Leading tokens of a chunk that are computed for real."""
    splicing: Splicing = Splicing.AUTO
    """For segments that do not say."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A segment that stands in the prompt and has an artifact."""

    key: str
    splice: SpliceSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """What can be spliced in one prompt."""

    placed: tuple[Placed, ...] = ()
    """By start, without overlaps."""
    left: tuple[tuple[str, Refusal], ...] = ()
    """Segments that are computed, and why."""

    def operations(self, predicted_cached: int) -> tuple[Operation, ...]:
        """Return the steps of the plan for what the cache does not hold."""
        steps: list[Operation] = []
        reached = -1
        for item in self.placed:
            splice = item.splice
            if splice.stop <= predicted_cached:
                continue
            if splice.start > max(reached, predicted_cached):
                steps.append(Prime(splice.start))
            steps.append(Splice(item.key, max(splice.start, predicted_cached), splice.stop, splice.artifact))
            reached = splice.stop
        return tuple(steps)

    def spliced_tokens(self, predicted_cached: int) -> int:
        """Count the tokens that are loaded if the cache holds the first `predicted_cached`."""
        return sum(
            max(0, item.splice.stop - max(item.splice.start, predicted_cached)) for item in self.placed
        )


def check_seam(seam: int) -> int:
    """Return a number of seam tokens.

    Raises
    ------
    ConfigurationError
        It is no whole number, or negative.
    """
    if isinstance(seam, bool) or not isinstance(seam, int) or seam < 0:
        raise ConfigurationError(f"seam={seam!r} has to be a whole number of tokens, 0 or more")
    return seam


def shelf_of(backend: Backend, tenant: str, splicing: Splicing) -> Shelf | None:
    """Return the artifacts that may be spliced for a tenant; None where nothing may be.

    Raises
    ------
    CapabilityError
        The backend says that it splices, and does not.
    """
    if splicing is Splicing.NEVER or not backend.capabilities.splices:
        return None
    if not isinstance(backend, Splicer):
        raise CapabilityError(
            f"backend {backend.capabilities.name!r} says that it splices, but has no find_artifact"
        )
    return Shelf(partial(found_or_made, backend, tenant), backend.seam, splicing)


def found_or_made(splicer: Splicer, tenant: str, ids: Sequence[int], wanted: Splicing) -> str | None:
    """Return the artifact of a chunk, compiled now if it is always to be spliced; None where that fails."""
    try:
        name = splicer.find_artifact(tenant, ids)
        if name is None and wanted is Splicing.ALWAYS:
            name = splicer.compile_chunk(tenant, ids)
    except AgentKVError as error:
        _LOG.warning("a chunk of %d tokens is computed instead of spliced: %s", len(ids), error)
        return None
    return name


def segment_splicing(prompt: Prompt, shelf: Shelf | None) -> Mapping[str, Splicing]:
    """Return for each skill and document of a prompt whether it may be spliced."""
    if shelf is None:
        return {}
    return {
        segment.key: shelf.splicing if segment.splice is Splicing.AUTO else segment.splice
        for segment in prompt.segments
        if isinstance(segment, Skill | Document)
    }


def told_texts(entries: Iterable[LedgerEntry]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every skill and document that an epoch's prompt holds."""
    for entry in entries:
        if isinstance(entry, Frozen | SegmentAdded):
            for key, text in entry.texts.items():
                if key.startswith(_SPLICEABLE):
                    yield key, text


def lay_out(
    ids: TokenIds,
    texts: Iterable[tuple[str, str]],
    splicing: Mapping[str, Splicing],
    shelf: Shelf,
    encoder: TemplateEncoder,
    costs: Costs,
    *,
    block: int,
    cached: int,
    new: Container[str],
) -> Layout:
    """Find where the chunks stand that have an artifact.

    A chunk is spliced only where the prompt holds exactly the artifact's tokens; up to `EDGE` at either end
    may have merged with their surroundings and are computed.

    Parameters
    ----------
    texts
        Key and text of what may be spliced.
    splicing
        How each declared segment is to be spliced; segments that are gone still stand in the prompt.
    block
        Tokens of a block of the prefix cache: a splice begins at a boundary.
    cached
        Tokens that the cache is predicted to hold. Of a chunk whose whole blocks are among them, those of the
        last, incomplete block are computed like all that follows.
    new
        Keys of segments that the model is told in this turn.
    """
    placed: list[Placed] = []
    left: list[tuple[str, Refusal]] = []
    words = ids.tobytes()
    for key, text in texts:
        wanted = splicing.get(key, shelf.splicing)
        if wanted is Splicing.NEVER:
            continue
        chunk = chunk_ids(text, encoder)
        name = shelf.find(chunk, wanted) if len(chunk) >= _LEAST else None
        if name is None:
            left.append((key, Refusal.MISSING))
            continue
        found = list(occurrences(words, chunk))
        if not found:
            left.append((key, Refusal.TOKENS))
        for at, stop in found:
            start = _boundary(at + max(shelf.seam, merged(ids, at, chunk)), block)
            end = min(stop, len(ids) - 1)
            if end // block * block <= cached:
                end = end // block * block
            pays = wanted is Splicing.ALWAYS or costs.splice_pays(end - start)
            if end - start >= _LEAST and pays:
                placed.append(Placed(key, SpliceSpec(name, start, end, start - at)))
    return Layout(tuple(_apart(placed)), tuple((key, why) for key, why in left if key in new))


def chunk_ids(text: str, encoder: TemplateEncoder) -> list[int]:
    """Return the tokens of a text as it is compiled: stripped, and no control token among them."""
    return encoder.chunk(text.strip())


def occurrences(words: bytes, chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Find a chunk in a prompt: where its first token stands or would stand, and where its tokens end.

    Parameters
    ----------
    words
        The prompt's ids as native 32-bit words.
    chunk
        The chunk's ids, more than twice `EDGE`.
    """
    whole = TokenIds(chunk).tobytes()
    inner = whole[4 * EDGE : len(whole) - 4 * EDGE]
    if not inner:
        return
    found = words.find(inner)
    while found >= 0:
        if found % 4:
            found = words.find(inner, found + 1)
            continue
        end = found + len(inner)
        grown = 0
        rest = whole[len(whole) - 4 * EDGE :]
        while grown < EDGE and words[end : end + 4] == rest[4 * grown : 4 * grown + 4] != b"":
            end += 4
            grown += 1
        yield found // 4 - EDGE, end // 4
        found = words.find(inner, end)


def merged(ids: TokenIds, at: int, chunk: Sequence[int]) -> int:
    """Count the leading tokens that a prompt does not share with a chunk at `at`; `EDGE` at most."""
    for index in range(EDGE, 0, -1):
        if at + index < 1 or ids[at + index - 1] != chunk[index - 1]:
            return index
    return 0


def _boundary(at: int, block: int) -> int:
    return -(-at // block) * block


def _apart(placed: Iterable[Placed]) -> Iterator[Placed]:
    reached = 0
    for item in sorted(placed, key=lambda item: (item.splice.start, -item.splice.stop)):
        if item.splice.start >= reached:
            yield item
            reached = item.splice.stop
