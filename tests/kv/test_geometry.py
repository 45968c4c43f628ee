"""A model's rotary positions are read from its configuration, or the model is refused by name and reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from agentkv.errors import CapabilityError
from agentkv.kv.geometry import _LAYOUTS
from agentkv.kv.rope import RopeSpec
from tests.kv.oracle import any_weights, computed, equal, spec_of

_SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 64,
    "initializer_range": 0.2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tiny(model_type: str) -> Any:
    """Make a small model of a type, with both kinds of attention where it has them."""
    kind = CONFIG_MAPPING[model_type]
    whole = kind().to_dict()
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in whole or name in kind.attribute_map or name in inspect.signature(kind).parameters
    }
    if "kv_lora_rank" in whole:
        sizes.pop("head_dim", None)
    if whole.get("layer_types") is not None and len(set(whole["layer_types"])) > 1:
        kinds = sorted(set(whole["layer_types"]), reverse=True)
        sizes["layer_types"] = kinds * (6 // len(kinds))
    if whole.get("mlp_layer_types") is not None:
        sizes["mlp_layer_types"] = ["dense"] + ["sparse"] * 5
    torch.manual_seed(0)
    config = kind(**sizes)
    return any_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize("model_type", sorted(_LAYOUTS))
def test_every_listed_model_moves_its_keys_as_listed(model_type: str) -> None:
    """The order of pairs, and which layers have positions, are those of the model's own code."""
    model, ids = _tiny(model_type), [17, 99, 3, 230]
    here = computed(model, ids, 5)
    moved = here.moved(28, spec_of(model))
    assert equal(moved, computed(model, ids, 28))
    assert not equal(moved, here)


def test_a_norm_after_the_rotation_is_no_rotation() -> None:
    """HunYuan weighs the numbers of turned keys, which no turn then moves: so it is not listed."""
    model, ids = _tiny("hunyuan_v1_dense"), [17, 99, 3, 230]
    with pytest.raises(CapabilityError, match=r"'hunyuan_v1_dense'.*does not know in which order"):
        spec_of(model)
    as_llama = RopeSpec.of({**model.config.to_dict(), "model_type": "llama"})
    assert not equal(computed(model, ids, 5).moved(28, as_llama), computed(model, ids, 28))


def _refused(model: str, changed: dict[str, Any]) -> str:
    config = CONFIG_MAPPING[model]().get_text_config(decoder=True).to_dict()
    with pytest.raises(CapabilityError) as caught:
        RopeSpec.of({**config, **changed})
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("gpt2", "added to the tokens' embeddings"),
        ("opt", "added to the tokens' embeddings"),
        ("gpt_neo", "added to the tokens' embeddings"),
        ("gpt_bigcode", "added to the tokens' embeddings"),
        ("mamba", "recurrent"),
        ("mamba2", "recurrent"),
        ("rwkv", "recurrent"),
        ("jamba", "recurrent"),
        ("bamba", "recurrent"),
        ("falcon_h1", "recurrent"),
        ("granitemoehybrid", "recurrent"),
        ("lfm2", "recurrent"),
        ("nemotron_h", "recurrent"),
        ("qwen3_next", "recurrent"),
        ("qwen3_5", "recurrent"),
        ("recurrent_gemma", "recurrent"),
        ("zamba2", "recurrent"),
        ("minimax", "layer 1 is of type 'linear_attention'"),
        ("qwen2_vl", "M-RoPE"),
        ("qwen2_5_vl", "M-RoPE"),
        ("qwen3_vl", "M-RoPE"),
        ("bart", "encoder"),
        ("mllama", r"layers [3, 8, 13, 18, 23, 28, 33, 38] attend to another input"),
        ("gemma3n", "15 layers use the KV of other layers"),
        ("deepseek_v32", "indexer"),
        ("gemma4", "unknown type 'proportional'"),
        ("nanochat", "does not know in which order"),
    ],
)
def test_other_positions_are_refused_by_name(model_type: str, reason: str) -> None:
    """The message names the model type and why its KV cannot be moved."""
    message = _refused(model_type, {})
    assert model_type in message
    assert reason in message


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic NTK"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic NTK"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "M-RoPE"),
        ({"type": "mrope"}, "M-RoPE"),
        ({"rope_type": "proportional"}, "unknown type 'proportional'"),
        ({"rope_type": "of tomorrow", "factor": 2.0}, "unknown type 'of tomorrow'"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "four"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "yarn"}, "yarn factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.7}, "size"),
        ({"rope_type": "default", "rope_theta": "big"}, "theta"),
        ({"full_attention": {"rope_type": "linear"}}, "none for layers of type None"),
    ],
)
def test_rotary_parameters_that_are_not_understood_are_refused(rope: dict[str, Any], reason: str) -> None:
    """Frequencies that change with the length, unknown types and missing numbers; nothing is guessed."""
    parameters = {"rope_theta": 10_000.0, **rope}
    assert reason in _refused(
        "llama", {"rope_parameters": parameters, "max_position_embeddings": None, "head_dim": 128}
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "llama_of_tomorrow"}, "does not know in which order"),
        ({"model_type": None}, "does not know in which order"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"alibi": True}, "ALiBi"),
        ({"position_embedding_type": "absolute"}, "added to the tokens' embeddings"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"mamba_d_state": 16}, "recurrent"),
        ({"num_key_value_heads": [4, 8]}, "different numbers of KV heads"),
        ({"layer_types": ["full_attention"]}, "32 layers and 1 layer types"),
        ({"layer_types": ["conv"] * 32}, "layer 0 is of type 'conv'"),
        ({"no_rope_layers": [1, 0]}, "32 layers and 2 no_rope_layers"),
        ({"num_hidden_layers": None}, "number of layers"),
        ({"head_dim": [64, 128]}, "head_dim"),
        ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ],
)
def test_what_the_configuration_says_goes_before_the_model_type(changed: dict[str, Any], reason: str) -> None:
    """A known type with unknown content is refused, and so is an unknown type with known content."""
    assert reason in _refused("llama", changed)


def test_exaone_needs_to_say_which_layers_slide() -> None:
    """There positions depend on it."""
    changed = {"layer_types": None, "sliding_window_pattern": None, "sliding_window": 4096}
    assert "which layers have a sliding window" in _refused("exaone4", changed)


@pytest.mark.parametrize(
    "old",
    [
        {"model_type": "llama", "rope_theta": 100000.0, "rope_scaling": None},
        {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "model_type": "llama",
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
        },
        {
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        {"model_type": "phi", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25},
        {
            "model_type": "gemma3_text",
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
            "sliding_window": 512,
        },
        {"model_type": "smollm3", "rope_theta": 2000000.0, "no_rope_layer_interval": 4},
    ],
    ids=lambda old: old["model_type"],
)
def test_older_configurations_say_the_same(old: dict[str, Any]) -> None:
    """A ``config.json`` as it was released reads as transformers reads it."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    released = {**sizes, **old}
    config = CONFIG_MAPPING[old["model_type"]](**{k: v for k, v in released.items() if k != "model_type"})
    assert RopeSpec.of(released) == RopeSpec.of(config.get_text_config(decoder=True).to_dict())


def test_layer_types_have_their_own_parameters() -> None:
    """Gemma 3 turns its local layers faster than its global ones."""
    spec = RopeSpec.of(CONFIG_MAPPING["gemma3_text"]().to_dict())
    local, whole = spec.rotation(0), spec.rotation(5)
    assert local is not None
    assert whole is not None
    assert (local.type, local.theta) == ("default", 10_000.0)
    assert whole.theta == 1_000_000.0
    assert spec.layers[:6] == (0, 0, 0, 0, 0, 1)
