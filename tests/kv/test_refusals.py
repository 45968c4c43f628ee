"""Each error about an artifact stands for one reason."""

from __future__ import annotations

import pickle

import pytest

from agentkv.errors import (
    ArtifactDamagedError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactMissingError,
    ArtifactSignatureError,
    TicketError,
)
from agentkv.kv.refusals import Refusal, refusal_of

REASONS = [
    (ArtifactMismatchError("", "tokens"), Refusal.TOKENS),
    (ArtifactMismatchError("", "model"), Refusal.FINGERPRINT),
    (ArtifactMismatchError("", "rope"), Refusal.ROPE),
    (ArtifactMismatchError("", "tenant"), Refusal.TENANT),
    (ArtifactMissingError(""), Refusal.MISSING),
    (ArtifactDamagedError(""), Refusal.DAMAGED),
    (ArtifactSignatureError(""), Refusal.SIGNATURE),
    (TicketError(""), Refusal.TICKET),
]


@pytest.mark.parametrize(("error", "reason"), REASONS, ids=str)
def test_an_error_is_counted_by_its_reason(error: ArtifactError, reason: Refusal) -> None:
    """The same one wherever it was raised."""
    assert refusal_of(error) is reason


@pytest.mark.parametrize(("error", "reason"), REASONS, ids=str)
def test_the_reason_survives_another_process(error: ArtifactError, reason: Refusal) -> None:
    """A server's worker may raise it, and its scheduler count it."""
    assert refusal_of(pickle.loads(pickle.dumps(error))) is reason


def test_every_kind_of_error_has_a_reason() -> None:
    """None was left out above."""
    assert {type(error) for error, _ in REASONS} == set(ArtifactError.__subclasses__())


def test_reasons_read_as_text() -> None:
    """They are shown in reports and as labels of metrics."""
    assert f"{Refusal.PRIME}" == "the prefix before it was not cached"
    assert len({reason.value for reason in Refusal}) == len(Refusal)
