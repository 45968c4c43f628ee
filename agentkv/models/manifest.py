"""The manifest that seals a converted model folder.

It is written last, after every other file is on disk: a folder that has a valid one is whole.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentkv.models.known import KnownModel
from agentkv.models.progress import Progress, Step

MANIFEST: Final = "agentkv-model.json"
"""File name of the manifest inside a model folder."""

_CHUNK: Final = 1 << 20


class FileRecord(BaseModel):
    """One file of a model folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[^/\\]+$")
    """File name; model folders are flat."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hex digest."""


class Manifest(BaseModel):
    """What a model folder was made from, and what it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    """Version of this file's form."""
    name: str
    """Name of the known model."""
    source: str
    """Pinned requirement that the weights came from."""
    source_sha256: str
    """Hex digest of the GGUF file."""
    licence: str
    """SPDX identifier."""
    converter: str
    """Version of the conversion; folders of another one are made anew."""
    transformers: str
    """Version of transformers that wrote the folder."""
    files: tuple[FileRecord, ...] = Field(min_length=1)
    """Every file but the manifest, by name."""

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files)


def file_sha256(path: Path, progress: Progress) -> str:
    """Return the hex SHA-256 of a file, telling `progress` each chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def seal(
    folder: Path, known: KnownModel, *, converter: str, transformers: str, progress: Progress
) -> Manifest:
    """Flush every file of `folder` to disk, then write its manifest and flush that.

    Raises
    ------
    OSError
        A file cannot be read or flushed.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    progress.begin(Step.DIGEST, sum(path.stat().st_size for path in paths))
    records = []
    for path in paths:
        flush(path)
        sha256 = file_sha256(path, progress)
        records.append(FileRecord(name=path.name, size=path.stat().st_size, sha256=sha256))
    flush(folder)
    manifest = Manifest(
        name=known.name,
        source=known.requirement,
        source_sha256=known.sha256,
        licence=known.licence,
        converter=converter,
        transformers=transformers,
        files=tuple(records),
    )
    written = folder / MANIFEST
    written.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    flush(written)
    flush(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest | str:
    """Return the manifest of `folder`, or why there is no valid one."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as problem:
        return f"{MANIFEST} cannot be read ({problem.strerror})"
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        return f"{MANIFEST} is not valid ({place}: {first['msg']})"


def wrong_size(folder: Path, manifest: Manifest) -> str | None:
    """Return what is wrong with the first file that is missing or of another size, None if none is."""
    for record in manifest.files:
        try:
            size = (folder / record.name).stat().st_size
        except OSError as problem:
            return f"{record.name} cannot be read ({problem.strerror})"
        if size != record.size:
            return f"{record.name} has {size} bytes, expected {record.size}"
    return None


def flush(path: Path) -> None:
    """Make a file, or a folder's list of names, survive a power cut (folders: where the system can)."""
    if path.is_dir() and os.name == "nt":
        return
    # Windows flushes only what is open for writing; folders open for reading only.
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
