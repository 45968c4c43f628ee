"""A small artifact for the tests of the store."""

from __future__ import annotations

from typing import Any

import torch

from agentkv.kv.artifact import ArtifactHeader
from agentkv.kv.identity import ModelIdentity
from agentkv.kv.spans import KVSpan, LayerKV
from tests.kv.test_identity import IDENTITY

KEY = bytes(range(32))
IDS = (5, 6, 7, 70000, 5, 6)
MODEL = ModelIdentity(**{**IDENTITY, "value_dim": 6})
ASKED: dict[str, Any] = {"ids": IDS, "identity": MODEL, "tenant": "acme"}


def span_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> KVSpan:
    """Two layers of six tokens and four heads, computed at 96."""
    torch.manual_seed(seed)
    layers = [LayerKV(torch.randn(4, 6, 8).to(dtype), torch.randn(4, 6, 6).to(dtype)) for _ in range(2)]
    return KVSpan(tuple(layers), 96)


def header_of(span: KVSpan, **changed: Any) -> ArtifactHeader:
    """Describe it as the chunk of all these tests."""
    return ArtifactHeader.of(span, **{**ASKED, "anchor": (1, 2, 3), **changed})


def same(one: KVSpan, other: KVSpan) -> bool:
    """Whether two spans are the same to the last bit."""
    return one.position == other.position and all(
        torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)
        for mine, its in zip(one.layers, other.layers, strict=True)
    )
