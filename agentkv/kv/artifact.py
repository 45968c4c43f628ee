"""What an artifact's file holds: one safetensors file of keys and values, with a header that says of what."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentkv.errors import ArtifactDamagedError, ArtifactMismatchError, ArtifactSignatureError
from agentkv.kv.complaints import complaint
from agentkv.kv.identity import ModelIdentity, artifact_name

if TYPE_CHECKING:
    import torch

    from agentkv.kv.spans import KVSpan

HEADER: Final = "agentkv"
"""Metadata of the file that holds the header's JSON."""
SIGNATURE: Final = "signature"
"""Metadata that holds the hex HMAC-SHA256 of that JSON."""

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
"""A token id, of 4 bytes."""


class ArtifactHeader(BaseModel):
    """A compiled chunk, described."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["agentkv-artifact"] = "agentkv-artifact"
    version: Literal[1] = 1
    tenant: str = Field(min_length=1)
    """Whose it is."""
    identity: ModelIdentity
    """The model that computed it."""
    anchor: tuple[TokenId, ...]
    """Token ids that it was computed behind; their KV is not kept."""
    ids: tuple[TokenId, ...] = Field(min_length=1)
    """Token ids of the chunk."""
    position: int = Field(ge=0)
    """Where its first token was computed."""
    content: str
    """SHA-256 in hex of all bytes of keys and values, layer by layer."""
    created: str
    """When, in UTC, as ISO 8601."""

    @classmethod
    def of(
        cls,
        span: KVSpan,
        *,
        tenant: str,
        identity: ModelIdentity,
        anchor: Sequence[int],
        ids: Sequence[int],
    ) -> ArtifactHeader:
        """Describe a span that was just computed."""
        return cls(
            tenant=tenant,
            identity=identity,
            anchor=tuple(anchor),
            ids=tuple(ids),
            position=span.position,
            content=content_digest(tensors_of(span)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def name(self) -> str:
        """The name of the artifact; see `artifact_name`."""
        return artifact_name(
            tenant=self.tenant, fingerprint=self.identity.fingerprint, anchor=self.anchor, ids=self.ids
        )

    def shapes(self) -> dict[str, list[int]]:
        """Name the file's tensors, in the order of their digest, with the shape of each."""
        model, tokens = self.identity, len(self.ids)
        shapes = {}
        for layer in range(model.layers):
            shapes[f"keys.{layer}"] = [model.kv_heads, tokens, model.key_dim]
            shapes[f"values.{layer}"] = [model.kv_heads, tokens, model.value_dim]
        return shapes

    def check(self, *, ids: Sequence[int], identity: ModelIdentity, tenant: str) -> None:
        """Compare it with what is about to be replaced by it.

        Raises
        ------
        ArtifactMismatchError
            It belongs to another tenant, other tokens or another model.
        """
        if tenant != self.tenant:
            raise ArtifactMismatchError(f"the artifact does not belong to tenant {tenant!r}", "tenant")
        if tuple(ids) != self.ids:
            raise ArtifactMismatchError(
                f"the artifact is of {len(self.ids)} tokens, which are not the {len(ids)} asked for; compile "
                "these",
                "tokens",
            )
        # As JSON, which is what was stored.
        mine, other = identity.model_dump(mode="json"), self.identity.model_dump(mode="json")
        if names := [name for name in mine if mine[name] != other[name]]:
            raise ArtifactMismatchError(
                f"the artifact was compiled by another model, which differs in {', '.join(names)}; compile "
                "the chunk again",
                "rope" if names == ["rope"] else "model",
            )


def tensors_of(span: KVSpan) -> Iterator[torch.Tensor]:
    """Yield the tensors of a span in the order of their digest."""
    for layer in span.layers:
        yield layer.keys
        yield layer.values


def content_digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 in hex of the bytes of all tensors, one after another."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def metadata_of(header: ArtifactHeader, key: bytes | None) -> dict[str, str]:
    """Write the header as metadata of its file, signed if there is a key."""
    text = header.model_dump_json()
    return {HEADER: text} if key is None else {HEADER: text, SIGNATURE: _signature(text, key)}


def read_metadata(metadata: dict[str, str] | None, key: bytes | None) -> ArtifactHeader:
    """Read the header back.

    Raises
    ------
    ArtifactSignatureError
        There is a key, and the header is not signed with it.
    ArtifactDamagedError
        There is no header, or one of another format.
    """
    text = (metadata or {}).get(HEADER)
    if text is None:
        raise ArtifactDamagedError("the file has no agentkv header, so it is no artifact")
    given = (metadata or {}).get(SIGNATURE, "")
    if key is not None and not hmac.compare_digest(given.encode(), _signature(text, key).encode()):
        raise ArtifactSignatureError(
            "the artifact is not signed with this store's key: it was altered, or written by another party"
        )
    try:
        return ArtifactHeader.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactDamagedError(
            f"the artifact's header is malformed or of another release of agentkv: {complaint(error)}"
        ) from None


def _signature(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()
