"""Spliced KV against the same tokens computed fresh: where theory says that it is exact, it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.backends import TransformersBackend
from agentkv.kv.store import ArtifactStore
from tests.splice_parts import (
    anchor_tokens,
    assert_same_kv,
    call,
    kv_of,
    request,
    spec,
    tiny_backend,
    tokens,
)
from tests.tiny_models import CUT_ANYWHERE, WINDOW, tiny_model

CHUNK = tokens(3 * WINDOW, seed=11)
QUESTION = tokens(9, seed=12)


@pytest.mark.parametrize("seam", [0, 5])
@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_a_chunk_behind_its_own_anchor_is_exact(name: str, seam: int, tmp_path: Path) -> None:
    """The prompt begins with the anchor: KV and answer are those of a full computation, past a window too."""
    prompt = [*anchor_tokens(), *CHUNK, *QUESTION]
    backend, plain = tiny_backend(name, tmp_path), tiny_backend(name)
    artifact = backend.compile_chunk("default", CHUNK)
    asked = request(prompt, spec(artifact, len(anchor_tokens()), CHUNK, seam))
    got, expected = call(backend, asked), call(plain, request(prompt))
    assert got.usage.spliced_tokens == len(CHUNK) - seam
    assert got.refused == ()
    assert got.ids == expected.ids
    assert_same_kv(kv_of(backend, request(prompt)), kv_of(plain, request(prompt)))


@pytest.mark.parametrize("before", [3, 200])
@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_a_chunk_of_one_token_is_exact_anywhere(name: str, before: int, tmp_path: Path) -> None:
    """Equal tokens attend to equal values: moved to any offset, the KV differs by the turn alone."""
    backend, plain = tiny_backend(name, tmp_path, anchor=""), tiny_backend(name)
    artifact = backend.compile_chunk("default", [65] * 40)
    prompt = [65] * (before + 40) + QUESTION
    got = call(backend, request(prompt, spec(artifact, before, [65] * 40)))
    assert got.usage.spliced_tokens == 40
    assert got.ids == call(plain, request(prompt)).ids
    assert_same_kv(kv_of(backend, request(prompt)), kv_of(plain, request(prompt)))


def test_a_moved_chunk_is_exact_where_windows_hide_what_it_was_not_compiled_behind(tmp_path: Path) -> None:
    """Every layer sees one window back, so deep in the prompt nothing depends on how it begins."""
    anchor = "The same words stand before the chunk wherever it is placed. " * 2
    same = anchor_tokens(anchor)
    assert len(same) > 4 * WINDOW
    backend, plain = tiny_backend("mistral_sliding", tmp_path, anchor=anchor), tiny_backend("mistral_sliding")
    artifact = backend.compile_chunk("default", CHUNK)
    prompt = [*tokens(77, seed=5), *same, *CHUNK, *QUESTION]
    got = call(backend, request(prompt, spec(artifact, 77 + len(same), CHUNK)))
    assert got.usage.spliced_tokens == len(CHUNK)
    assert got.ids == call(plain, request(prompt)).ids
    assert_same_kv(kv_of(backend, request(prompt)), kv_of(plain, request(prompt)))


@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_first_layer_keys_are_exact_behind_any_prefix(name: str, tmp_path: Path) -> None:
    """They depend on token and position alone; deeper layers show that the chunk was not recomputed."""
    backend, plain = tiny_backend(name, tmp_path), tiny_backend(name)
    artifact = backend.compile_chunk("default", CHUNK)
    prompt = [*tokens(31, seed=6), *CHUNK, *QUESTION]
    call(backend, request(prompt, spec(artifact, 31, CHUNK, 4)))
    call(plain, request(prompt))
    got, expected = kv_of(backend, request(prompt)), kv_of(plain, request(prompt))
    torch.testing.assert_close(got.layers[0].keys, expected.layers[0].keys, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got.layers[-1].keys, expected.layers[-1].keys, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
def test_chunked_prefill_changes_nothing(prefill_chunk: int, tmp_path: Path) -> None:
    """Compiled and computed in pieces of any size, the KV and the answer are the same."""
    prompt = [*anchor_tokens(), *CHUNK, *QUESTION]
    backend = tiny_backend("gemma3_sliding", tmp_path, prefill_chunk=prefill_chunk)
    artifact = backend.compile_chunk("default", CHUNK)
    got = call(backend, request(prompt, spec(artifact, len(anchor_tokens()), CHUNK, 2)))
    plain = tiny_backend("gemma3_sliding")
    assert got.ids == call(plain, request(prompt)).ids
    assert_same_kv(kv_of(backend, request(prompt)), kv_of(plain, request(prompt)))


def test_an_artifact_holds_what_the_model_computes(tmp_path: Path) -> None:
    """The chunk's KV behind the anchor, at the position where it was computed, and nothing of the anchor."""
    backend, plain = tiny_backend("llama", tmp_path), tiny_backend("llama")
    name = backend.compile_chunk("default", CHUNK)
    store = ArtifactStore(tmp_path)
    header = store.header(name)
    span = store.load(name, ids=CHUNK, identity=header.identity, tenant="default")
    prompt = [*anchor_tokens(), *CHUNK, 0]
    call(plain, request(prompt))
    start = len(anchor_tokens())
    assert (header.anchor, header.ids, header.position) == (tuple(prompt[:start]), tuple(CHUNK), start)
    assert_same_kv(span, kv_of(plain, request(prompt)).slice(start, start + len(CHUNK)))


def test_a_model_that_turns_otherwise_than_it_says_is_refused(tmp_path: Path) -> None:
    """The configuration is checked on the model itself: here it was changed after the model was made."""
    from agentkv.errors import CapabilityError

    model = tiny_model("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}
    with pytest.raises(CapabilityError, match="layer 0"):
        tiny_backend(model, tmp_path)


# The small model: skills of a real prompt

SKILL = (
    "Returns. A customer may return a parcel within 14 days of delivery. The return is free of charge if the "
    "goods were damaged, and costs 4 euros otherwise. Refunds are paid within 5 working days to the account "
    "that the order was paid from. Food, medicine and custom-made goods cannot be returned. A customer who "
    "lost the receipt gives the order number instead. Gifts are refunded as vouchers, valid for 2 years."
)
QUESTIONS = (
    "Within how many days can a parcel be returned?",
    "What does a return cost if the goods were not damaged?",
    "How are gifts refunded?",
    "What does a customer without a receipt give?",
    "How long are vouchers valid?",
)


def test_the_small_model_answers_from_a_spliced_skill(small_model_dir: Path, tmp_path: Path) -> None:
    """Behind a prompt that the skill never saw, answers begin as those of a full computation, but for one."""
    from agentkv.splicing import chunk_ids
    from agentkv.template import TemplateEncoder

    backend = TransformersBackend.from_pretrained(small_model_dir, dtype=torch.float32, artifacts=tmp_path)
    encoder = TemplateEncoder(backend.tokenizer)
    chunk = chunk_ids(SKILL, encoder)
    artifact = backend.compile_chunk("default", chunk)
    agreed = 0
    for number, question in enumerate(QUESTIONS):
        ids = encoder.opening(
            [
                {
                    "role": "system",
                    "content": f"You are the clerk of a small shop.\n\n# Returns\n\n{SKILL}\n",
                },
                {"role": "user", "content": question},
            ]
        )
        at = next(i for i in range(len(ids)) if ids[i + 4 : i + 40] == chunk[4:40])
        end = len(chunk) - 4
        part = spec(artifact, at, chunk[:end], backend.seam)
        spliced = call(backend, request(ids, part, conversation=f"spliced {number}"))
        backend.reset()
        full = call(backend, request(ids, conversation=f"full {number}"))
        backend.reset()
        assert spliced.usage.spliced_tokens == end - backend.seam
        assert full.usage.spliced_tokens == 0
        agreed += (spliced.ids or ())[0] == (full.ids or ())[0]
    assert agreed >= len(QUESTIONS) - 1
