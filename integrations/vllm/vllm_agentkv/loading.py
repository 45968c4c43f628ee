"""Artifacts in a worker's memory, over those on disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

from agentkv.kv import ArtifactStore, KVSpan, ModelIdentity, RopeSpec
from agentkv.kv.spans import join
from vllm_agentkv.work import FileStamp, Piece, Source


class Tier(StrEnum):
    """Where an artifact was taken from."""

    RAM = "ram"
    DISK = "disk"


class Tiers:
    """Holds the artifacts used last, up to a number of bytes.

    Parameters
    ----------
    store
        Where they lie on disk.
    identity
        The model of this server.
    rank, of
        This worker's place under tensor parallelism: it reads its own heads only.
    most
        Bytes of KV that are kept; 0 keeps none.
    """

    def __init__(
        self, store: ArtifactStore, identity: ModelIdentity, *, rank: int, of: int, most: int
    ) -> None:
        self._store = store
        self._identity = identity
        self._rope = RopeSpec.model_validate(identity.rope)
        self._rank, self._of = rank, of
        self._most = most
        self._held: OrderedDict[tuple[str, FileStamp], KVSpan] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of KV that are held now."""
        return self._nbytes

    def span(self, name: str, source: Source) -> tuple[KVSpan, Tier]:
        """Return an artifact's KV of this rank's heads, and where it was taken from.

        The content is not digested again while the file is the one that was verified.

        Raises
        ------
        ArtifactError
            It is gone, damaged, or another than was verified.
        """
        key = (name, source.stamp)
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            return held, Tier.RAM
        same = FileStamp.of(self._store.path(name)) == source.stamp
        loaded = self._store.load_heads(
            name,
            self._rank,
            self._of,
            ids=source.ids,
            identity=self._identity,
            tenant=source.tenant,
            verified=same,
        )
        self._keep(key, loaded)
        return loaded, Tier.DISK

    def placed(self, pieces: Iterable[Piece], sources: Iterable[Source]) -> tuple[KVSpan, list[Tier]]:
        """Return contiguous pieces as one span that stands where the first of them begins.

        Raises
        ------
        ArtifactError
            One of their artifacts cannot be used.
        """
        spans, tiers = [], []
        for piece, source in zip(pieces, sources, strict=True):
            whole, tier = self.span(piece.artifact, source)
            part = whole.slice(piece.offset, piece.offset + piece.stop - piece.start)
            spans.append(part.moved(piece.start, self._rope))
            tiers.append(tier)
        return (join(spans) if len(spans) > 1 else spans[0]), tiers

    def _keep(self, key: tuple[str, FileStamp], span: KVSpan) -> None:
        if span.nbytes > self._most:
            return
        self._held[key] = span
        self._nbytes += span.nbytes
        while self._nbytes > self._most:
            _, dropped = self._held.popitem(last=False)
            self._nbytes -= dropped.nbytes
