"""Models whose KV is bound to its place: positions other than rotary ones, and state other than KV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from agentkv.errors import CapabilityError

_RECURRENT: Final = re.compile(
    "(use_|n_)?mamba|ssm_|linear_(key|value|num|conv|head)|conv_|conv1d_|state_size|time_step|lru_"
    "|block_types$|layers_block_type$|attn_layer_(period|indices)|hybrid_"
)
"""Names of settings that only models with a recurrent or convolutional state have."""

# Their configurations say nothing of positions.
_LEARNED: Final = frozenset(
    {"biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "trocr", "xglm"}
)
_ALIBI: Final = frozenset({"bloom"})
_STATEFUL: Final = frozenset({"rwkv", "xlstm"})
_SEVERAL_AXES: Final = frozenset(
    {
        "glm4v_text",
        "glm4v_moe_text",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen2_5_omni_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
    }
)

_MOVABLE: Final = frozenset({"default", "linear", "llama3", "yarn"})
_ROPE_TYPES: Final = {
    "dynamic": "dynamic NTK changes the frequencies with the length of the prompt",
    "longrope": "longrope changes the frequencies once a prompt outgrows the original window",
    "su": "longrope changes the frequencies once a prompt outgrows the original window",
    "mrope": "M-RoPE gives a token several positions",
    "axial": "axial RoPE gives a token several positions",
}


def refuse(config: Mapping[str, Any], why: str) -> NoReturn:
    """Raise with the model type and the reason.

    Raises
    ------
    CapabilityError
        Always.
    """
    raise CapabilityError(
        f"the KV of a {config.get('model_type')!r} model cannot be moved to other positions: {why}; compute "
        "its prompts without splices"
    )


def refuse_other_positions(config: Mapping[str, Any]) -> None:
    """Refuse all that is known not to be plain attention with rotary positions.

    Raises
    ------
    CapabilityError
        The keys of such a model are bound to their place.
    """
    model = config.get("model_type")
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        refuse(config, "it attends to an encoder")
    if config.get("cross_attention_layers"):
        refuse(config, f"layers {config['cross_attention_layers']} attend to another input")
    attention = config.get("attn_config")
    nested = attention if isinstance(attention, Mapping) else {}
    if model in _ALIBI or config.get("alibi") or nested.get("alibi"):
        refuse(config, "ALiBi biases attention by distance and has no rotary positions")
    kind = config.get("position_embedding_type")
    if model in _LEARNED or config.get("learned_pos_emb") or kind not in (None, "rope", "rotary"):
        refuse(config, "positions are added to the tokens' embeddings, so every layer's keys depend on them")
    if model in _STATEFUL or any(_RECURRENT.match(name) and config[name] is not None for name in config):
        refuse(
            config,
            "some layers keep a recurrent or convolutional state, which belongs to the last token alone",
        )
    if config.get("index_topk"):
        refuse(config, "an indexer keeps keys of its own beside the KV")
    if config.get("num_kv_shared_layers"):
        refuse(config, f"{config['num_kv_shared_layers']} layers use the KV of other layers")
    if isinstance(config.get("num_key_value_heads"), list):
        refuse(config, "its layers have different numbers of KV heads")
    if model in _SEVERAL_AXES:
        refuse(config, _ROPE_TYPES["mrope"])
    for parameters in _all_parameters(config):
        _refuse_rope_type(config, parameters)


def _all_parameters(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if isinstance(given, Mapping):
            yield given
            yield from (value for value in given.values() if isinstance(value, Mapping))


def _refuse_rope_type(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    if parameters.get("mrope_section") is not None:
        refuse(config, _ROPE_TYPES["mrope"])
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind in _ROPE_TYPES:
        refuse(config, _ROPE_TYPES[kind])
    if kind is not None and kind not in _MOVABLE:
        refuse(config, f"its rotary positions are of the unknown type {kind!r}")
