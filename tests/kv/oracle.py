"""Keys and values computed fresh, which is what moved ones have to equal."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from agentkv.backends.model_traits import forward_arguments
from agentkv.kv.rope import RopeSpec
from agentkv.kv.spans import KVSpan, LayerKV

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def computed(model: Any, ids: list[int], position: int) -> KVSpan:
    """Compute the KV of tokens with nothing before them, their first at `position`."""
    argument, fixed = forward_arguments(model)
    # Without a configuration every layer keeps all positions.
    cache = DynamicCache()
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(position, position + len(ids))[None],
            **{argument: cache},
            **fixed,
        )
    layers = tuple(LayerKV(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers)
    return KVSpan(layers, position)


def any_weights(model: Any, seed: int = 1) -> Any:
    """Change all weights that begin as ones or zeros, those of norms above all, in place."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def spec_of(model: Any) -> RopeSpec:
    """Read the rotary positions of a model."""
    return RopeSpec.of(model.config.get_text_config(decoder=True).to_dict())


def equal(one: KVSpan, other: KVSpan) -> bool:
    """Whether all keys and values are those of the other, up to the order of float32 operations."""
    return len(one.layers) == len(other.layers) and all(
        torch.allclose(mine.keys, its.keys, **TOLERANCE)
        and torch.allclose(mine.values, its.values, **TOLERANCE)
        for mine, its in zip(one.layers, other.layers, strict=True)
    )
