"""What is measured: a model in this process, or a server; and how an artifact is made cold again."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentkv import AgentKVContext, Policy, SamplingOptions, Skill
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder
from benchmarks.splice.corpus import filler
from benchmarks.splice.watch import Watched

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer

TENANT: Final = "default"
_FILLER_SEED: Final = 999
_READS: Final = re.compile(
    r'^vllm:agentkv_artifact_reads_total\{[^}]*tier="(\w+)"[^}]*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Reads:
    """How often artifacts were taken from each tier so far."""

    ram: int
    disk: int

    def since(self, before: Reads) -> str:
        """Return what was used since an earlier count: ``"ram"``, ``"disk"``, ``"both"`` or ``"none"``."""
        ram, disk = self.ram > before.ram, self.disk > before.disk
        return "both" if ram and disk else "ram" if ram else "disk" if disk else "none"


class Target(Protocol):
    """Something that splices."""

    @property
    def backend(self) -> Watched:
        """The backend; another one after `cold`."""
        ...

    def cold(self) -> None:
        """Leave no artifact in memory."""
        ...

    def reads(self) -> Reads | None:
        """Return where artifacts were taken from so far; None where nobody counts."""
        ...

    def nbytes(self, artifact: str) -> int | None:
        """Return an artifact's size on disk; None if it lies elsewhere."""
        ...


class ModelTarget:
    """A transformers model in this process.

    Parameters
    ----------
    store
        Folder of artifacts.
    files
        The model's own folder; None takes digests of what is in memory.
    """

    def __init__(self, model: Any, tokenizer: ChatTokenizer, store: Path, files: Path | None) -> None:
        self._model, self._tokenizer, self._store, self._files = model, tokenizer, store, files
        self._backend = self._fresh()

    def _fresh(self) -> Watched:
        from agentkv.backends import TransformersBackend

        return Watched(
            TransformersBackend(self._model, self._tokenizer, artifacts=self._store, folder=self._files)
        )

    @property
    def backend(self) -> Watched:
        """The backend; another one after `cold`."""
        return self._backend

    def cold(self) -> None:
        """Take a backend that has loaded nothing, and have the system forget the files' pages."""
        self._backend = self._fresh()
        forget_pages(self._store)

    def reads(self) -> Reads | None:
        """Nobody counts: a fresh backend holds nothing."""
        return None

    def nbytes(self, artifact: str) -> int | None:
        """Return an artifact's size on disk."""
        return file_size(self._store, artifact)


class ServerTarget:
    """A vLLM server with the connector.

    Parameters
    ----------
    metrics
        Reads the server's ``/metrics``.
    store
        Its folder of artifacts, if it lies on this machine.
    filler_tokens
        Tokens of a chunk that fills the memory for artifacts, so that nothing else stays in it.
    """

    def __init__(
        self, backend: Watched, metrics: Callable[[], str], store: Path | None, filler_tokens: int
    ) -> None:
        self._backend, self._metrics, self._store = backend, metrics, store
        self._filler_tokens = filler_tokens
        self._filler: str | None = None

    @property
    def backend(self) -> Watched:
        """The backend."""
        return self._backend

    def cold(self) -> None:
        """Have the server load a chunk that leaves no room for others, and the system forget the files."""
        if self._filler is None:
            encoder = TemplateEncoder(self._backend.tokenizer)
            self._filler = filler(encoder, self._filler_tokens, _FILLER_SEED)
            self._backend.compile_chunk(TENANT, chunk_ids(self._filler, encoder))
        load(self._backend, [self._filler])
        if self._store is not None:
            forget_pages(self._store)

    def reads(self) -> Reads | None:
        """Return the connector's own counts."""
        return parsed_reads(self._metrics())

    def nbytes(self, artifact: str) -> int | None:
        """Return an artifact's size on disk."""
        return None if self._store is None else file_size(self._store, artifact)


def load(backend: Watched, texts: list[str]) -> None:
    """Splice texts in a conversation that nobody measures."""
    segments = [Policy("Be brief."), *(Skill(f"part {number}", text) for number, text in enumerate(texts))]
    options = SamplingOptions(max_tokens=1)
    with AgentKVContext(
        backend, segments, salt_key=secrets.token_bytes(32), sampling=options, tenant=TENANT
    ) as context:
        context.ask("Are you there?")


def parsed_reads(metrics: str) -> Reads | None:
    """Read the connector's counts from ``/metrics``, summed over engines; None if there are none."""
    counts: dict[str, int] = {}
    for tier, value in _READS.findall(metrics):
        counts[tier] = counts.get(tier, 0) + int(float(value))
    return Reads(counts.get("ram", 0), counts.get("disk", 0)) if counts else None


def file_size(store: Path, artifact: str) -> int | None:
    """Return the size of an artifact's file; None if there is none."""
    file = store / f"{artifact}.safetensors"
    return file.stat().st_size if file.exists() else None


def forget_pages(folder: Path) -> None:
    """Have the operating system drop the pages of a folder's files, where it can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
