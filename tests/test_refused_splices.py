"""Splices that the embedded backend refuses: the tokens are computed, and the answer is the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.backends import TransformersBackend
from agentkv.backends.base import RefusedSplice, SpliceSpec
from agentkv.backends.kvcache import GrowingLayer
from agentkv.kv.refusals import Refusal
from agentkv.kv.spans import KVSpan
from agentkv.kv.store import ArtifactStore
from agentkv.salts import Namespace, salt
from tests.splice_parts import APPROXIMATE, EXACT, KEY, call, file_of, request, spec, tiny_backend, tokens
from tests.tiny_models import tiny_model

CHUNK = tokens(48, seed=1)
OTHER = tokens(40, seed=2)
BEFORE = tokens(23, seed=3)
QUESTION = tokens(7, seed=5)
PROMPT = [*BEFORE, *CHUNK, *QUESTION]


def refused_alike(backend: TransformersBackend, part: SpliceSpec, reason: Refusal, **more: str) -> None:
    """The splice is refused for `reason`, and the answer is the plain one."""
    done = call(backend, request(PROMPT, part, **more))
    assert done.refused == (RefusedSplice(part, reason),)
    assert done.usage.computed_tokens == len(PROMPT)
    assert done.ids == call(tiny_backend("llama"), request(PROMPT)).ids


def test_a_missing_artifact_is_computed(tmp_path: Path) -> None:
    """No file of this name, or no longer, though it was loaded before."""
    backend = tiny_backend("llama", tmp_path)
    refused_alike(backend, spec("0" * 64, len(BEFORE), CHUNK), Refusal.MISSING)
    name = backend.compile_chunk("default", CHUNK)
    call(backend, request(PROMPT, spec(name, len(BEFORE), CHUNK), conversation="b"))
    backend.reset()
    file_of(tmp_path).unlink()
    refused_alike(backend, spec(name, len(BEFORE), CHUNK), Refusal.MISSING)


def test_a_damaged_artifact_is_computed_and_replaced_when_compiled_again(tmp_path: Path) -> None:
    """One changed byte of its KV is enough."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    data = bytearray(file_of(tmp_path).read_bytes())
    data[-5] ^= 1
    file_of(tmp_path).write_bytes(bytes(data))
    part = spec(name, len(BEFORE), CHUNK)
    refused_alike(backend, part, Refusal.DAMAGED)
    backend.reset()
    assert backend.compile_chunk("default", CHUNK) == name
    assert call(backend, request(PROMPT, part)).refused == ()


def test_an_artifact_cut_off_is_computed(tmp_path: Path) -> None:
    """As a copy that ran out of space leaves it."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    file_of(tmp_path).write_bytes(file_of(tmp_path).read_bytes()[:-100])
    refused_alike(backend, spec(name, len(BEFORE), CHUNK), Refusal.DAMAGED)


def test_an_artifact_of_another_tenant_is_computed(tmp_path: Path) -> None:
    """Also where it is in memory already."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("acme", CHUNK)
    part = spec(name, len(BEFORE), CHUNK)
    acme = salt(KEY, tenant="acme", namespace=Namespace.APPROXIMATE)
    refused_alike(backend, part, Refusal.TENANT)
    backend.reset()
    assert call(backend, request(PROMPT, part, tenant="acme", salt=acme)).usage.spliced_tokens == len(CHUNK)
    refused_alike(backend, part, Refusal.TENANT)
    assert backend.find_artifact("default", CHUNK) is None
    assert backend.find_artifact("acme", CHUNK) == name


@pytest.mark.parametrize("exact", [EXACT, "", "approx-", APPROXIMATE[:-1]])
def test_an_exact_namespace_is_computed(exact: str, tmp_path: Path) -> None:
    """Only a salt that says so may hold approximate KV."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    refused_alike(backend, spec(name, len(BEFORE), CHUNK), Refusal.NAMESPACE, salt=exact)


def test_an_artifact_of_another_model_is_computed(tmp_path: Path) -> None:
    """Of other weights: it has another name, and one that is asked for by name is refused."""
    other = tiny_backend(tiny_model("llama", seed=1), tmp_path)
    name = other.compile_chunk("default", CHUNK)
    backend = tiny_backend("llama", tmp_path)
    assert backend.find_artifact("default", CHUNK) is None
    refused_alike(backend, spec(name, len(BEFORE), CHUNK), Refusal.FINGERPRINT)


def test_other_tokens_are_computed(tmp_path: Path) -> None:
    """One token to the side, or those of another text."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    other = backend.compile_chunk("default", OTHER)
    refused_alike(backend, SpliceSpec(name, len(BEFORE) + 1, len(BEFORE) + 40, 0), Refusal.TOKENS)
    backend.reset()
    refused_alike(backend, SpliceSpec(other, len(BEFORE), len(BEFORE) + 40, 0), Refusal.TOKENS)


@pytest.mark.parametrize(
    ("start", "stop", "offset"), [(60, 900, 0), (60, 30, 0), (-3, 30, 0), (23, 60, -1), (23, 71, 40)]
)
def test_a_span_that_does_not_fit_is_computed(start: int, stop: int, offset: int, tmp_path: Path) -> None:
    """Beyond the prompt, beyond the artifact, or upside down."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    refused_alike(backend, SpliceSpec(name, start, stop, offset), Refusal.SPAN)


@pytest.mark.parametrize("name", ["../../secret", "", "A" * 64, "0" * 63])
def test_a_name_is_never_a_path(name: str, tmp_path: Path) -> None:
    """What is no name of an artifact is refused."""
    backend = tiny_backend("llama", tmp_path / "store")
    done = call(backend, request(PROMPT, SpliceSpec(name, len(BEFORE), len(BEFORE) + 40, 0)))
    assert [refused.reason for refused in done.refused] in ([Refusal.MISSING], [Refusal.DAMAGED])
    assert done.usage.computed_tokens == len(PROMPT)


def test_a_backend_without_artifacts_says_so() -> None:
    """Splices that are asked for all the same are computed."""
    refused_alike(tiny_backend("llama"), spec("0" * 64, len(BEFORE), CHUNK), Refusal.DISABLED)


def test_one_refused_splice_keeps_no_other_from_being_loaded(tmp_path: Path) -> None:
    """Each is judged by itself."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", OTHER)
    prompt = [*BEFORE, *CHUNK, *OTHER, *QUESTION]
    missing = spec("0" * 64, len(BEFORE), CHUNK)
    done = call(backend, request(prompt, missing, spec(name, len(BEFORE) + len(CHUNK), OTHER)))
    assert done.refused == (RefusedSplice(missing, Refusal.MISSING),)
    assert done.usage.spliced_tokens == len(OTHER)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_splice_that_fails_on_the_way_is_computed(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the midst of the layers: none keeps a part of it."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    append, calls = GrowingLayer.append, []

    def failing(self: GrowingLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        calls.append(self)
        if len(calls) == layer + 1:
            raise torch.OutOfMemoryError("out of memory")
        append(self, keys, values)

    monkeypatch.setattr(GrowingLayer, "append", failing)
    refused_alike(backend, spec(name, len(BEFORE), CHUNK), Refusal.LOAD)
    assert len(calls) == layer + 1


def test_kv_of_another_shape_is_never_added(tmp_path: Path) -> None:
    """One head would be repeated for all, if it were only assigned."""
    backend = tiny_backend("llama", tmp_path)
    call(backend, request(PROMPT))
    with backend._runner.opened(request([*PROMPT[:40], 0]), room=0) as entry:
        kv, one = entry.state, entry.state.span(0, 5).heads(0, 2)
        with pytest.raises(ValueError, match="do not fit"):
            kv.append(KVSpan(one.layers, 40))
        with pytest.raises(ValueError, match="does not continue"):
            kv.append(kv.span(0, 5))
        assert (kv.length, kv.observed_length()) == (40, 40)


def test_what_is_cached_is_not_refused(tmp_path: Path) -> None:
    """Nothing of it was computed instead."""
    backend = tiny_backend("llama", tmp_path)
    call(backend, request(PROMPT))
    assert call(backend, request(PROMPT, spec("0" * 64, len(BEFORE), CHUNK))).refused == ()


def test_a_signed_store_loads_what_it_signed(tmp_path: Path) -> None:
    """An artifact of another key is computed, and not replaced."""
    backend = tiny_backend("llama", ArtifactStore(tmp_path, key=KEY))
    name = backend.compile_chunk("default", CHUNK)
    part = spec(name, len(BEFORE), CHUNK)
    assert call(backend, request(PROMPT, part)).refused == ()
    stranger = tiny_backend("llama", ArtifactStore(tmp_path, key=KEY[::-1]))
    refused_alike(stranger, part, Refusal.SIGNATURE)
