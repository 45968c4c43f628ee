"""Keys that were moved are the keys computed at the new position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from agentkv.errors import CapabilityError
from agentkv.kv.rope import RopeSpec, Rotation, rotate
from tests.kv.oracle import TOLERANCE, any_weights, computed, equal, spec_of
from tests.tiny_models import ROTARY, tiny_model

IDS = list(b"a chunk of it")
HERE, THERE = 5, 178


@pytest.fixture(scope="module", params=ROTARY)
def model(request: pytest.FixtureRequest) -> Any:
    """One model for each kind of rotary positions."""
    return any_weights(tiny_model(request.param))


@pytest.mark.parametrize(("start", "stop"), [(HERE, THERE), (THERE, HERE), (0, 1)])
def test_moved_keys_are_those_computed_there(model: Any, start: int, stop: int) -> None:
    """In every layer, forwards and backwards; the values are the same."""
    moved = computed(model, IDS, start).moved(stop, spec_of(model))
    assert equal(moved, computed(model, IDS, stop))


def test_keys_that_were_not_moved_differ(model: Any) -> None:
    """The control: the comparison sees a chunk at the wrong place, in each layer with positions."""
    spec = spec_of(model)
    here, there = computed(model, IDS, HERE), computed(model, IDS, THERE)
    pairs = zip(here.layers, there.layers, strict=True)
    same = [
        torch.allclose(getattr(one, part), getattr(other, part), **TOLERANCE)
        for one, other in pairs
        for part in ("keys", "values")
    ]
    turned = [
        (rotation is not None and rotation.part == part)
        for rotation in map(spec.rotation, range(len(spec.layers)))
        for part in ("keys", "values")
    ]
    assert same == [not is_turned for is_turned in turned]
    assert any(turned)


@pytest.mark.parametrize("position", [THERE - 1, THERE + 1])
def test_a_move_to_the_next_position_differs(model: Any, position: int) -> None:
    """One position too few or too many is seen."""
    moved = computed(model, IDS, HERE).moved(position, spec_of(model))
    assert not equal(moved, computed(model, IDS, THERE))


def test_moves_add_up_and_can_be_undone(model: Any) -> None:
    """By way of another place is the same, and the way back leads to the same keys."""
    spec, span = spec_of(model), computed(model, IDS, HERE)
    assert equal(span.moved(90, spec).moved(THERE, spec), span.moved(THERE, spec))
    assert equal(span.moved(THERE, spec).moved(HERE, spec), span)


def test_first_layer_in_a_longer_prompt_has_the_moved_keys() -> None:
    """What stands before a chunk changes deeper layers alone, so there a moved key is the prompt's own."""
    model = any_weights(tiny_model("llama"))
    prefix = list(b"what stands before ")
    prompt = computed(model, prefix + IDS, 0).slice(len(prefix), len(prefix) + len(IDS))
    moved = computed(model, IDS, 0).moved(len(prefix), spec_of(model))
    assert torch.allclose(moved.layers[0].keys, prompt.layers[0].keys, **TOLERANCE)
    assert not torch.allclose(moved.layers[1].keys, prompt.layers[1].keys, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_16_bits_are_turned_in_float32(dtype: torch.dtype) -> None:
    """A moved key is as near as its dtype allows, and keeps it."""
    model = any_weights(tiny_model("llama"))
    here, there = (computed(model, IDS, position).layers[2].keys for position in (HERE, THERE))
    moved = rotate(here.to(dtype), THERE - HERE, spec_of(model), 2)
    assert moved.dtype == dtype
    # Each number comes from two that were rounded, and is rounded once more.
    allowed = 2 * torch.finfo(dtype).eps * here.abs().max()
    assert (moved.float() - there).abs().max() <= allowed


def test_nothing_is_copied_where_nothing_is_turned() -> None:
    """A move by nothing, and a layer without positions, give the keys themselves."""
    spec = spec_of(tiny_model("smollm3_without_positions"))
    keys = torch.randn(2, 5, 8)
    assert rotate(keys, 0, spec, 0) is keys
    assert spec.inv_freq(3) is None
    assert rotate(keys, 7, spec, 3) is keys


def test_keys_given_are_left_as_they_are() -> None:
    """A turn makes new keys."""
    keys = torch.randn(2, 5, 8)
    before = keys.clone()
    assert not torch.equal(rotate(keys, 7, spec_of(tiny_model("llama")), 0), before)
    assert torch.equal(keys, before)


def test_leading_dimensions_may_be_any() -> None:
    """A batch is turned like its parts."""
    spec = spec_of(tiny_model("phi_partial"))
    keys = torch.randn(3, 2, 5, 8)
    assert torch.equal(rotate(keys, 9, spec, 1)[2], rotate(keys[2], 9, spec, 1))


def test_keys_of_another_size_are_refused() -> None:
    """A runtime that caches something else than the configuration says is noticed."""
    with pytest.raises(CapabilityError, match=r"layer 1 caches 16 numbers per head where 8 were expected"):
        rotate(torch.randn(2, 5, 16), 3, spec_of(tiny_model("llama")), 1)


def test_the_other_order_of_pairs_is_another_specification() -> None:
    """Keys of one order are turned wrongly by the other, so the two are never taken for one another."""
    model = any_weights(tiny_model("cohere_pairs"))
    spec = spec_of(model)
    halves = spec.in_layout(interleaved=False)
    assert halves != spec
    assert halves.in_layout(interleaved=True) == spec
    assert not equal(computed(model, IDS, HERE).moved(THERE, halves), computed(model, IDS, THERE))


_YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FULL_SIZE = {
    "llama": (LlamaRotaryEmbedding, LlamaConfig(head_dim=128)),
    "llama 3.1": (LlamaRotaryEmbedding, LlamaConfig(head_dim=128, rope_parameters=_LLAMA31)),
    "yarn": (LlamaRotaryEmbedding, LlamaConfig(head_dim=128, rope_parameters=_YARN)),
    "yarn of gpt-oss": (GptOssRotaryEmbedding, GptOssConfig()),
    "yarn of deepseek": (
        DeepseekV3RotaryEmbedding,
        DeepseekV3Config(rope_parameters={**_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    ),
}


@pytest.mark.parametrize("name", _FULL_SIZE)
def test_frequencies_are_those_of_the_runtime(name: str) -> None:
    """At the sizes and factors of released models, and with the same scaling of attention."""
    module, config = _FULL_SIZE[name]
    theirs = module(config)
    spec = RopeSpec.of(config.to_dict())
    ours, rotation = spec.inv_freq(0), spec.rotation(0)
    assert ours is not None
    assert rotation is not None
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert rotation.attention_factor == pytest.approx(theirs.attention_scaling)


_ROTATIONS = st.builds(
    Rotation,
    type=st.just("default"),
    theta=st.sampled_from([100.0, 10_000.0, 1e6]),
    dim=st.just(16),
    start=st.sampled_from([0, 4]),
    size=st.sampled_from([2, 8, 12]),
    interleaved=st.booleans(),
)


@given(_ROTATIONS, st.integers(-100_000, 100_000), st.integers(-100_000, 100_000))
@settings(deadline=None)
def test_turns_add_up_far_from_the_beginning(rotation: Rotation, one: int, other: int) -> None:
    """Whatever the distance: angles are computed with enough digits, and lengths stay."""
    spec = RopeSpec(rotations=(rotation,), layers=(0,))
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 16)
    there = rotate(rotate(keys, one, spec, 0), other, spec, 0)
    torch.testing.assert_close(there, rotate(keys, one + other, spec, 0), **TOLERANCE)
    torch.testing.assert_close(there.norm(dim=-1), keys.norm(dim=-1), **TOLERANCE)


def test_specification_survives_json() -> None:
    """What is stored with an artifact reads back as the same."""
    spec = spec_of(tiny_model("gemma3_local_global"))
    assert RopeSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": (0, 1)},
        {"layers": (-1,)},
        {"rotations": ({"type": "default", "theta": 1e4, "dim": 8, "size": 16},)},
        {"rotations": ({"type": "default", "theta": 1e4, "dim": 8, "size": 3},)},
        {"rotations": ({"type": "yarn", "theta": 1e4, "dim": 8, "size": 8},)},
        {"rotations": ({"type": "dynamic", "theta": 1e4, "dim": 8, "size": 8},)},
        {"rotations": ({"type": "default", "theta": 1e4, "dim": 8, "size": 8, "other": 1},)},
    ],
)
def test_specification_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """A rotation that does not fit its head, or lacks a factor, never turns a key."""
    right: dict[str, Any] = {
        "rotations": ({"type": "default", "theta": 1e4, "dim": 8, "size": 8},),
        "layers": (0,),
    }
    assert RopeSpec.model_validate(right)
    with pytest.raises(ValueError, match="validation error"):
        RopeSpec.model_validate({**right, **wrong})
