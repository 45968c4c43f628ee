"""What an artifact's KV depends on, and the name made from it.

Nothing here needs torch: whoever computes these digests, an embedded model or a server, gets the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentkv.errors import ConfigurationError, ModelNotFoundError

_EDGE: Final = 4096
_LARGEST_HEADER: Final = 100_000_000


class ModelIdentity(BaseModel):
    """A model as far as its KV depends on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    """Class of the model, such as ``LlamaForCausalLM``."""
    weights: str
    """`weights_digest` of its folder."""
    tokenizer: str
    """`tokenizer_digest` of its folder."""
    revision: str | None = None
    """Its commit, where it has one."""
    layers: int = Field(ge=1)
    """Layers that hold keys and values."""
    kv_heads: int = Field(ge=1)
    """KV heads of the whole model, whatever the tensor parallel layout."""
    key_dim: int = Field(ge=1)
    """Numbers in the key of one token and head."""
    value_dim: int = Field(ge=1)
    """Numbers in the value of one token and head."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Type of keys and values."""
    rope: dict[str, Any]
    """JSON of its `RopeSpec`."""
    adapter: str = ""
    """Digest of a LoRA adapter; empty for none."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the canonical JSON of all this."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def artifact_name(*, tenant: str, fingerprint: str, anchor: Sequence[int], ids: Sequence[int]) -> str:
    """Name an artifact by all that its KV depends on, and by its tenant: 64 hex digits.

    Parameters
    ----------
    tenant
        Whose it is; not empty. One tenant's artifacts are never found by another.
    fingerprint
        `ModelIdentity.fingerprint`.
    anchor
        Token ids that it is compiled behind.
    ids
        Token ids of the chunk; at least one.

    Raises
    ------
    ConfigurationError
        The tenant or the ids are empty, or an id is negative or takes more than 4 bytes.
    """
    if not tenant:
        raise ConfigurationError("the tenant is empty; name whose artifact it is, such as 'default'")
    if not ids:
        raise ConfigurationError("an artifact of no tokens was named; give the chunk's token ids")
    try:
        owner = tenant.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"tenant {tenant!r} holds a lone surrogate; remove it") from None
    parts = {
        b"format": b"agentkv-artifact/1",
        b"tenant": owner,
        b"fingerprint": fingerprint.encode(),
        b"anchor": _id_bytes(anchor),
        b"ids": _id_bytes(ids),
    }
    digest = hashlib.sha256()
    for tag, part in parts.items():
        _add(digest, tag)
        _add(digest, part)
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """Digest of a model's safetensors files, in hex, from a small part of their bytes.

    It covers every tensor's name, shape and type and the first and last 4 KiB of its bytes, whatever files
    the tensors are spread over: training or merging changes it, copying does not.

    Raises
    ------
    ModelNotFoundError
        The folder has no safetensors file, or one that cannot be read.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder} holds no *.safetensors file; save the model there in that format")
    tensors = {}
    for file in files:
        try:
            tensors.update(_tensor_digests(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelNotFoundError(
                f"{file} cannot be read as safetensors: {error}; fetch it again"
            ) from error
    digest = hashlib.sha256(b"agentkv-weights/1")
    for name in sorted(tensors):
        _add(digest, name.encode())
        _add(digest, tensors[name])
    return digest.hexdigest()


def tokenizer_digest(folder: str | Path) -> str:
    """SHA-256 in hex of a model's tokenizer: ``tokenizer.json``, else ``tokenizer.model``, else a GGUF file.

    Raises
    ------
    ModelNotFoundError
        The folder has none of them.
    """
    place = Path(folder)
    candidates = [place / "tokenizer.json", place / "tokenizer.model", *sorted(place.glob("*.gguf"))]
    for candidate in candidates:
        if candidate.is_file():
            with candidate.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    raise ModelNotFoundError(f"{folder} holds no tokenizer.json, tokenizer.model or *.gguf; save it there")


def _tensor_digests(path: Path) -> dict[str, bytes]:
    """Digest each tensor of a safetensors file: a length, a JSON header with offsets, the bytes."""
    found = {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"its header would take {size} bytes")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            digest = hashlib.sha256()
            _add(digest, json.dumps([entry["dtype"], entry["shape"]]).encode())
            for at in (start, max(start, stop - _EDGE)):
                wanted = min(_EDGE, stop - at)
                file.seek(8 + size + at)
                edge = file.read(wanted)
                if len(edge) != wanted:
                    raise ValueError(f"it ends within tensor {name!r}")
                _add(digest, edge)
            found[name] = digest.digest()
    return found


def _id_bytes(ids: Sequence[int]) -> bytes:
    try:
        return b"".join(int(token).to_bytes(4, "little") for token in ids)
    except OverflowError:
        wrong = next(token for token in ids if not 0 <= token < 2**32)
        raise ConfigurationError(f"token id {wrong} is not between 0 and 2**32 - 1") from None


def _add(digest: hashlib._Hash, part: bytes) -> None:
    # Behind its length: no two sequences of parts give the same bytes.
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)
