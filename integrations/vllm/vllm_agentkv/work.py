"""What the scheduler's half of the connector orders of the worker's, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Tells whether a file is still the one that was verified: artifacts are replaced, never changed."""

    inode: int
    size: int
    """Bytes."""
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp | None:
        """Return a file's stamp; None if it is not there."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Piece:
    """Prompt tokens ``[start, stop)`` come from an artifact's ``[offset, offset + stop - start)``."""

    artifact: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Source:
    """A verified artifact, as far as a worker has to know it."""

    tenant: str
    ids: tuple[int, ...]
    """All its token ids."""
    stamp: FileStamp
    """Its file when it was verified."""


@dataclass(frozen=True, slots=True)
class Load:
    """Contiguous pieces of one request, to be written into its blocks before the step's forward pass."""

    request: str
    pieces: tuple[Piece, ...]
    sources: tuple[Source, ...]
    """One for each piece."""
    blocks: tuple[int, ...]
    """The request's blocks from its first token on, to the one that holds the last loaded token."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is to be compiled: a prompt is `anchor` and `ids`."""

    tenant: str
    anchor: tuple[int, ...]
    """Token ids whose KV is dropped."""
    ids: tuple[int, ...]
    """Token ids whose KV is kept."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows of a chunk that one step computes."""

    request: str
    chunk: Chunk
    first: int
    """Index in the chunk of the first of them."""
    slots: tuple[int, ...]
    """Slot in the paged cache of each."""
    last: bool
    """Whether the prompt is computed to its end with this step."""


@dataclass(frozen=True, slots=True)
class Written:
    """A compiled chunk lies in the store."""

    artifact: str
    nbytes: int
    """Size of its file."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A chunk could not be compiled."""

    message: str
    """Why, and what to do."""
