"""Why a chunk was computed although it could have been spliced."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from agentkv.errors import (
    ArtifactError,
    ArtifactMismatchError,
    ArtifactMissingError,
    ArtifactSignatureError,
    TicketError,
)


class Refusal(StrEnum):
    """One reason; the same words in a backend's answer, a server's metrics and a report."""

    TOKENS = "the prompt holds other tokens"
    FINGERPRINT = "compiled by another model"
    ROPE = "other rotary positions"
    TENANT = "belongs to another tenant"
    MISSING = "no such artifact"
    DAMAGED = "the artifact is damaged"
    SIGNATURE = "the artifact's signature is wrong"
    NAMESPACE = "the request's namespace is exact"
    TICKET = "no valid ticket"
    PRIME = "the prefix before it was not cached"
    LOAD = "loading failed"
    PROTOCOL = "another version of the protocol"
    SPAN = "the span does not fit the prompt"
    DISABLED = "splicing is switched off"


_DIFFERS: Final = {
    "tokens": Refusal.TOKENS,
    "model": Refusal.FINGERPRINT,
    "rope": Refusal.ROPE,
    "tenant": Refusal.TENANT,
}


def refusal_of(error: ArtifactError) -> Refusal:
    """Give the reason that an error stands for; *damaged* for an artifact that cannot be read."""
    if isinstance(error, ArtifactMismatchError):
        return _DIFFERS[error.differs]
    if isinstance(error, ArtifactMissingError):
        return Refusal.MISSING
    if isinstance(error, ArtifactSignatureError):
        return Refusal.SIGNATURE
    if isinstance(error, TicketError):
        return Refusal.TICKET
    return Refusal.DAMAGED
