"""What the tests of splices share: tiny backends with artifacts, and the same without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentkv.anchor import anchor_ids
from agentkv.backends import Completion, Request, SamplingOptions, TransformersBackend, complete
from agentkv.backends.base import SpliceSpec
from agentkv.kv.spans import KVSpan
from agentkv.salts import Namespace, salt
from agentkv.tokens import TokenIds
from tests.tiny_models import ByteTokenizer, tiny_model

KEY = b"a key of sixteen bytes or more"
APPROXIMATE = salt(KEY, tenant="default", namespace=Namespace.APPROXIMATE)
EXACT = salt(KEY, tenant="default", namespace=Namespace.EXACT)
ANSWER = 6
"""Tokens generated in each call."""
ANCHOR = "You answer for a parcel office, and say only what you know."


def tokens(count: int, seed: int) -> list[int]:
    """Random bytes."""
    return random.Random(seed).choices(range(256), k=count)


def anchor_tokens(text: str = ANCHOR) -> list[int]:
    """Tokens of the anchor that `tiny_backend` compiles behind."""
    return list(anchor_ids(ByteTokenizer(), text))


def tiny_backend(
    model: Any, artifacts: Path | Any | None = None, *, anchor: str = ANCHOR, **options: Any
) -> TransformersBackend:
    """A backend on a tiny model, given by its name or itself; answers end by their length only."""
    model = tiny_model(model) if isinstance(model, str) else model
    model.generation_config.eos_token_id = None
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()
    return TransformersBackend(model, tokenizer, artifacts=artifacts, anchor=anchor, **options)


def request(
    ids: Sequence[int], *splices: SpliceSpec, conversation: str = "a", salt: str = APPROXIMATE, **more: Any
) -> Request:
    """A request for `ANSWER` tokens."""
    options = SamplingOptions(max_tokens=ANSWER)
    return Request(TokenIds(ids), conversation, salt, options, splices=splices, **more)


def call(backend: TransformersBackend, asked: Request) -> Completion:
    """Run a request, and check that its counts add up."""
    done = complete(backend, asked)
    usage = done.usage
    assert usage.cached_tokens + usage.spliced_tokens + usage.computed_tokens == usage.prompt_tokens
    assert usage.prompt_tokens == len(asked.ids)
    return done


def kv_of(backend: TransformersBackend, asked: Request) -> KVSpan:
    """The KV that a backend holds for a prompt, without its last token."""
    with backend._runner.opened(asked, room=0) as entry:
        assert len(entry.ids) == len(asked.ids) - 1
        return entry.state.span(0, len(entry.ids))


def assert_same_kv(one: KVSpan, other: KVSpan, *, tolerance: float = 1e-4) -> None:
    """Every layer's keys and values agree."""
    for a, b in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(a.values, b.values, rtol=tolerance, atol=tolerance)


def spec(name: str, at: int, chunk: Sequence[int], seam: int = 0) -> SpliceSpec:
    """Splice a whole chunk that stands at `at`, behind its seam."""
    return SpliceSpec(name, at + seam, at + len(chunk), seam)


def file_of(folder: Path) -> Path:
    """The only artifact's file."""
    (file,) = folder.glob("*.safetensors")
    return file
