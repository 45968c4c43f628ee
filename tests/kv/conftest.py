"""A store with one artifact in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv.kv.store import ArtifactStore
from tests.kv.artifacts import KEY, header_of, span_of


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store that signs."""
    return ArtifactStore(tmp_path / "artifacts", key=KEY)


@pytest.fixture
def name(store: ArtifactStore) -> str:
    """An artifact in it."""
    return store.save(header_of(span_of()), span_of())
