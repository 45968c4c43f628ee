"""Loading compiled chunks into the KV of a prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError

from agentkv.anchor import anchor_ids
from agentkv.backends.base import RefusedSplice, Request, SpliceSpec
from agentkv.backends.kvcache import ModelKV
from agentkv.backends.kvstore import Entry
from agentkv.backends.model_identity import identity_of
from agentkv.backends.runner import Meter, ModelRunner
from agentkv.errors import (
    AgentKVError,
    ArtifactDamagedError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactMissingError,
)
from agentkv.kv.artifact import ArtifactHeader
from agentkv.kv.identity import ModelIdentity, artifact_name
from agentkv.kv.refusals import Refusal, refusal_of
from agentkv.kv.spans import KVSpan, LayerKV
from agentkv.kv.store import ArtifactStore
from agentkv.salts import is_approximate

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class LoadedArtifact:
    """An artifact in memory."""

    tenant: str
    ids: tuple[int, ...]
    span: KVSpan

    @property
    def nbytes(self) -> int:
        """Bytes of its KV."""
        return self.span.nbytes


class LoadedArtifacts:
    """Artifacts in memory, by name, the least recently used first to go.

    Parameters
    ----------
    limit_bytes
        Most bytes of KV to keep; a larger artifact is used and not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held: OrderedDict[str, LoadedArtifact] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of KV held."""
        with self._lock:
            return sum(artifact.nbytes for artifact in self._held.values())

    def get(self, name: str) -> LoadedArtifact | None:
        """Return one that is held."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
            return self._held.get(name)

    def put(self, name: str, artifact: LoadedArtifact) -> None:
        """Hold one, as far as the bound allows."""
        if artifact.nbytes > self._limit:
            return
        with self._lock:
            self._held[name] = artifact
            self._held.move_to_end(name)
            total = sum(held.nbytes for held in self._held.values())
            while total > self._limit:
                _, gone = self._held.popitem(last=False)
                total -= gone.nbytes

    def forget(self, name: str) -> None:
        """Hold one no longer."""
        with self._lock:
            self._held.pop(name, None)


class ModelArtifacts:
    """The artifacts of one model in a store.

    Parameters
    ----------
    store
        Where they are kept.
    identity
        The model.
    anchor
        Token ids that chunks are compiled behind.
    limit_bytes
        Most bytes of loaded artifacts to keep in memory.
    """

    def __init__(
        self,
        store: ArtifactStore,
        identity: ModelIdentity,
        anchor: Sequence[int],
        *,
        limit_bytes: int,
    ) -> None:
        self.store: Final = store
        self.identity: Final = identity
        self.anchor: Final = tuple(anchor)
        self.loaded: Final = LoadedArtifacts(limit_bytes)
        self._fingerprint = identity.fingerprint
        self._damaged: set[str] = set()

    def name(self, tenant: str, ids: Sequence[int]) -> str:
        """Return the name of a chunk's artifact, whether there is one or not."""
        return artifact_name(tenant=tenant, fingerprint=self._fingerprint, anchor=self.anchor, ids=ids)

    def find(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of a chunk's artifact if there is one and it was not found to be damaged."""
        name = self.name(tenant, ids)
        try:
            self.store.nbytes(name)
        except OSError:
            # Missing, or in a folder that cannot be read.
            return None
        return None if name in self._damaged and not self.sound(name) else name

    def sound(self, name: str) -> bool:
        """Whether there is an artifact of this name, to its last byte."""
        try:
            self.store.verify(name)
        except ArtifactError:
            return False
        self._damaged.discard(name)
        return True

    def save(self, tenant: str, ids: Sequence[int], span: KVSpan) -> str:
        """Store a chunk that was just computed, and return its name.

        Raises
        ------
        ArtifactError
            It could not be written.
        """
        header = ArtifactHeader.of(span, tenant=tenant, identity=self.identity, anchor=self.anchor, ids=ids)
        try:
            return self.store.save(header, span)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"an artifact of {len(span)} tokens cannot be written to {self.store.folder} ({error}): "
                "check free space and permissions"
            ) from error

    def load(self, name: str, tenant: str) -> LoadedArtifact:
        """Return an artifact, from memory if it is held there.

        Raises
        ------
        ArtifactError
            It is not there, not sound, or of another model or tenant.
        """
        try:
            # One that was deleted is not used, though it is held.
            self.store.nbytes(name)
            held = self.loaded.get(name) or self._read(name, tenant)
        except ArtifactMissingError:
            self.loaded.forget(name)
            raise
        except ArtifactDamagedError:
            self._damaged.add(name)
            raise
        if held.tenant != tenant:
            raise ArtifactMismatchError(
                f"artifact {name} belongs to another tenant than {tenant!r}", "tenant"
            )
        return held

    def _read(self, name: str, tenant: str) -> LoadedArtifact:
        header = self.store.header(name)
        span = self.store.load(name, ids=header.ids, identity=self.identity, tenant=tenant)
        # What the store returns may be pages of the file, and follow it when it is changed.
        layers = tuple(LayerKV(layer.keys.clone(), layer.values.clone()) for layer in span.layers)
        held = LoadedArtifact(header.tenant, header.ids, KVSpan(layers, span.position))
        self.loaded.put(name, held)
        return held


def model_artifacts(
    runner: ModelRunner,
    tokenizer: ChatTokenizer,
    artifacts: ArtifactStore | str | Path,
    anchor: str,
    folder: str | Path | None,
    *,
    limit_bytes: int,
) -> ModelArtifacts:
    """Open the artifacts of a model; parameters are those of `TransformersBackend`.

    Raises
    ------
    CapabilityError
        The KV of this model cannot be moved.
    """
    return ModelArtifacts(
        artifacts if isinstance(artifacts, ArtifactStore) else ArtifactStore(artifacts),
        identity_of(runner.model, tokenizer, runner.movable, folder),
        anchor_ids(tokenizer, anchor),
        limit_bytes=limit_bytes,
    )


def splice_in(
    runner: ModelRunner,
    artifacts: ModelArtifacts,
    entry: Entry[ModelKV],
    request: Request,
    meter: Meter,
) -> None:
    """Bring KV up to the last splice of a prompt: load what can be loaded, and compute what stands between.

    What cannot be loaded is noted in `meter` with its reason, and left to be computed.
    """
    ids = request.ids
    for splice in sorted(request.splices, key=lambda splice: splice.start):
        # The first token shows each layer its dtype and device, and the last one gives the logits.
        start, stop = max(splice.start, len(entry.ids), 1), min(splice.stop, len(ids) - 1)
        if splice.start < splice.stop <= max(len(entry.ids), 1):
            continue
        found = _usable(artifacts, splice, request)
        if isinstance(found, Refusal):
            meter.refused.append(RefusedSplice(splice, found))
            continue
        if start >= stop:
            continue
        runner.compute(entry, ids, start, meter)
        begin = splice.offset + start - splice.start
        part = found.span.slice(begin, begin + stop - start)
        try:
            runner.append(entry, part, ids, meter)
        except (RuntimeError, ValueError):
            # Nothing of it was added: the tokens can still be computed.
            meter.refused.append(RefusedSplice(splice, Refusal.LOAD))


def _usable(artifacts: ModelArtifacts, splice: SpliceSpec, request: Request) -> LoadedArtifact | Refusal:
    if not is_approximate(request.salt):
        return Refusal.NAMESPACE
    if not 0 <= splice.start < splice.stop <= len(request.ids) or splice.offset < 0:
        return Refusal.SPAN
    try:
        artifact = artifacts.load(splice.artifact, request.tenant)
    except ArtifactError as error:
        return refusal_of(error)
    except (AgentKVError, OSError):
        return Refusal.LOAD
    end = splice.offset + len(splice)
    if end > len(artifact.ids):
        return Refusal.SPAN
    same = list(artifact.ids[splice.offset : end]) == request.ids.tolist(splice.start, splice.stop)
    return artifact if same else Refusal.TOKENS
