"""A folder of artifacts. They are written whole or not at all, and never changed."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentkv.errors import ArtifactDamagedError, ArtifactError, ArtifactMissingError, ConfigurationError
from agentkv.kv.artifact import ArtifactHeader, content_digest, metadata_of, read_metadata, tensors_of
from agentkv.kv.identity import ModelIdentity
from agentkv.kv.spans import KVSpan, LayerKV, head_range

_NAME: Final = re.compile("[0-9a-f]{64}")
_SUFFIX: Final = ".safetensors"
_LEAST_KEY: Final = 16
_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class ArtifactStore:
    """Artifacts in one folder, a file each; several processes and machines may share it.

    A process that is killed while it writes leaves a hidden ``*.tmp`` file, which nothing reads.

    Parameters
    ----------
    folder
        Where they are; made at the first `save`.
    key
        At least 16 secret bytes that artifacts are signed with. With a key, an artifact that is not signed
        with it is refused; without one, whoever can write to the folder decides what a model has read.

    Raises
    ------
    ConfigurationError
        The key is too short.
    """

    def __init__(self, folder: str | Path, *, key: bytes | None = None) -> None:
        if key is not None and len(key) < _LEAST_KEY:
            raise ConfigurationError(
                f"the signing key is {len(key)} bytes; give {_LEAST_KEY} random bytes or more "
                "(secrets.token_bytes)"
            )
        self._folder = Path(folder)
        self._key = key

    @property
    def folder(self) -> Path:
        """Where the artifacts are."""
        return self._folder

    def path(self, name: str) -> Path:
        """Return the file of an artifact, whether it is there or not.

        Raises
        ------
        ArtifactMissingError
            The name is not one of an artifact; it may have come from anywhere, and never becomes a path.
        """
        if _NAME.fullmatch(name) is None:
            raise ArtifactMissingError(f"no artifact has a name like {name[:80]!r}: names are 64 hex digits")
        return self._folder / f"{name}{_SUFFIX}"

    def names(self) -> tuple[str, ...]:
        """Names of all artifacts, sorted."""
        stems = (path.name.removesuffix(_SUFFIX) for path in self._folder.glob(f"*{_SUFFIX}"))
        return tuple(sorted(stem for stem in stems if _NAME.fullmatch(stem)))

    def nbytes(self, name: str) -> int:
        """Size of an artifact's file in bytes.

        Raises
        ------
        ArtifactMissingError
            There is none of this name.
        """
        path = self.path(name)
        try:
            return path.stat().st_size
        except FileNotFoundError:
            raise _missing(name, self._folder) from None

    def delete(self, name: str) -> None:
        """Delete an artifact if it is there. Who is reading it can read it to its end."""
        self.path(name).unlink(missing_ok=True)

    def save(self, header: ArtifactHeader, span: KVSpan) -> str:
        """Write an artifact and return its name; one that is there already and sound is left as it is.

        Raises
        ------
        ConfigurationError
            The header is not that of the span.
        """
        _check_span(header, span)
        name = header.name
        path = self.path(name)
        if self._sound(name):
            return name
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".{name}.{secrets.token_hex(8)}.tmp"
        tensors = dict(zip(header.shapes(), map(_plain, tensors_of(span)), strict=True))
        try:
            save_file(tensors, draft, metadata_of(header, self._key))
            _sync(draft)
            self._put(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        with suppress(PermissionError):  # not every system lets a folder be opened
            _sync(self._folder)
        return name

    def header(self, name: str) -> ArtifactHeader:
        """Read what an artifact is, and none of its keys and values.

        Raises
        ------
        ArtifactMissingError
            There is none of this name.
        ArtifactDamagedError
            It is cut, of an unknown format, or not what its name says.
        ArtifactSignatureError
            It is not signed with the store's key.
        """
        with self._opened(name) as (_, header):
            return header

    def verify(self, name: str) -> ArtifactHeader:
        """Read an artifact to its last byte; the header is returned.

        Raises
        ------
        ArtifactError
            As `header`; also where keys or values were altered.
        """
        with self._opened(name) as (file, header):
            _check_content(header, map(file.get_tensor, header.shapes()))
            return header

    def load(
        self, name: str, *, ids: Sequence[int], identity: ModelIdentity, tenant: str, verified: bool = False
    ) -> KVSpan:
        """Read an artifact's keys and values.

        Parameters
        ----------
        name
            The artifact.
        ids, identity, tenant
            Tokens that it stands for, the model that will read it, and whose request it is.
        verified
            Whether this process has checked its content before; its bytes are then not hashed again.

        Raises
        ------
        ArtifactMismatchError
            It is of other tokens, another model or another tenant.
        ArtifactError
            As `verify`.
        """
        with self._opened(name) as (file, header):
            header.check(ids=ids, identity=identity, tenant=tenant)
            span = _read(header, file.get_tensor)
            if not verified:
                _check_content(header, tensors_of(span))
            return span

    def load_heads(
        self,
        name: str,
        rank: int,
        of: int,
        *,
        ids: Sequence[int],
        identity: ModelIdentity,
        tenant: str,
        verified: bool = False,
    ) -> KVSpan:
        """Read the KV heads of one rank of `of`, as `KVSpan.heads` shares them out.

        With `verified`, nothing but these is read from the disk. The other parameters are those of `load`.

        Raises
        ------
        ArtifactError
            As `load`.
        ConfigurationError
            There is no such rank, or the heads cannot be shared out evenly.
        """
        with self._opened(name) as (file, header):
            header.check(ids=ids, identity=identity, tenant=tenant)
            first, last = head_range(header.identity.kv_heads, rank, of)
            if not verified:
                _check_content(header, map(file.get_tensor, header.shapes()))
            return _read(header, lambda tensor: file.get_slice(tensor)[first:last])

    def _sound(self, name: str) -> bool:
        try:
            self.verify(name)
        except ArtifactError:
            return False
        return True

    def _put(self, draft: Path, path: Path) -> None:
        """Give a file its name. The first writer wins, so that who reads it twice reads the same."""
        try:
            os.link(draft, path)
        except FileExistsError:
            if not self._sound(path.name.removesuffix(_SUFFIX)):
                draft.replace(path)
        except OSError:  # a file system without links: the last writer wins there
            draft.replace(path)

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, ArtifactHeader]]:
        path = self.path(name)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = read_metadata(file.metadata(), self._key)
                _check_layout(name, header, file)
                yield file, header
        except FileNotFoundError:
            raise _missing(name, self._folder) from None
        except ArtifactError:
            raise
        except (SafetensorError, OSError) as error:
            raise ArtifactDamagedError(
                f"artifact {name} cannot be read: {error}; delete it and compile the chunk again"
            ) from error


def _read(header: ArtifactHeader, tensor: Callable[[str], torch.Tensor]) -> KVSpan:
    layers = (
        LayerKV(tensor(f"keys.{layer}"), tensor(f"values.{layer}")) for layer in range(header.identity.layers)
    )
    return KVSpan(tuple(layers), header.position)


def _check_span(header: ArtifactHeader, span: KVSpan) -> None:
    dtype = getattr(torch, header.identity.dtype)
    found = [list(tensor.shape) for tensor in tensors_of(span)]
    types = {tensor.dtype for tensor in tensors_of(span)}
    if found != list(header.shapes().values()) or types != {dtype} or span.position != header.position:
        raise ConfigurationError(
            f"a span of {len(span.layers)} layers, {found[0]} keys and {found[1]} values of "
            f"{', '.join(map(str, types))} at position {span.position} is not the one that its header "
            "describes; make it with ArtifactHeader.of"
        )
    if content_digest(tensors_of(span)) != header.content:
        raise ConfigurationError("the header was made of another span; make it with ArtifactHeader.of")


def _check_layout(name: str, header: ArtifactHeader, file: Any) -> None:
    if header.name != name:
        raise ArtifactDamagedError(
            f"artifact {name} holds artifact {header.name}; delete it and compile again"
        )
    shapes = header.shapes()
    if set(file.keys()) != shapes.keys():
        raise ArtifactDamagedError(f"artifact {name} does not hold the layers that it says; compile it again")
    for tensor, shape in shapes.items():
        part = file.get_slice(tensor)
        if part.get_shape() != shape or part.get_dtype() != _DTYPES[header.identity.dtype]:
            raise ArtifactDamagedError(
                f"{tensor} of artifact {name} is {part.get_dtype()} {part.get_shape()}, not "
                f"{header.identity.dtype} {shape}; compile it again"
            )


def _check_content(header: ArtifactHeader, tensors: Iterator[torch.Tensor]) -> None:
    if content_digest(tensors) != header.content:
        raise ArtifactDamagedError(
            f"keys or values of artifact {header.name} were altered; delete it and compile the chunk again"
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A file takes tensors on the CPU with memory of their own.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _missing(name: str, folder: Path) -> ArtifactMissingError:
    return ArtifactMissingError(f"there is no artifact {name} in {folder}; compile the chunk")
