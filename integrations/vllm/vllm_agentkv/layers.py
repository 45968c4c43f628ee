"""The model's attention layers, and writing KV into them through vLLM's own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentkv.errors import CapabilityError
from agentkv.kv import KVSpan, ModelIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention


def attention_layers(config: VllmConfig, identity: ModelIdentity) -> list[Attention]:
    """Return the layers that hold KV, in the model's order, once each is known to be writable.

    Raises
    ------
    CapabilityError
        A layer is of another kind, writes its KV inside its forward pass, or is one too many or too few.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index

    base: Any = AttentionLayerBase
    every: dict[str, Any] = get_layers_from_vllm_config(config, base)
    for name, layer in every.items():
        problem = _problem(layer, identity) if isinstance(layer, Attention) else "is no plain attention"
        if problem:
            raise CapabilityError(
                f"the SpliceConnector cannot write KV into layer {name} ({type(layer).__name__}): it "
                f"{problem}"
            )
    names = sorted(every, key=extract_layer_index)
    if len(names) != identity.layers:
        raise CapabilityError(
            f"the SpliceConnector found {len(names)} layers with KV where the model's configuration says "
            f"{identity.layers}; this model cannot be spliced"
        )
    return [every[name] for name in names]


def write(layers: Sequence[Attention], span: KVSpan, slots: Sequence[int]) -> None:
    """Write a span into slots of the paged cache.

    The cache's interior is the backend's secret (on the CPU it is packed by instruction set), so nothing but
    the backend's own kernel writes to it.

    Parameters
    ----------
    layers
        `attention_layers`.
    span
        KV of one rank's heads, turned for its place.
    slots
        One for each token of it.
    """
    device = layers[0].kv_cache.device
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    for layer, held in zip(layers, span.layers, strict=True):
        # [heads, tokens, dim] in artifacts, [tokens, heads, dim] for the kernel
        keys = held.keys.transpose(0, 1).contiguous().to(device, layer.kv_cache_torch_dtype)
        values = held.values.transpose(0, 1).contiguous().to(device, layer.kv_cache_torch_dtype)
        impl: Any = layer.impl
        impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, mapping)


def _problem(layer: Attention, identity: ModelIdentity) -> str | None:
    if layer.attn_backend.forward_includes_kv_cache_update or not hasattr(layer.impl, "do_kv_cache_update"):
        return (
            f"runs on {layer.attn_backend.get_name()}, which writes KV inside its forward pass; choose "
            "another --attention-backend"
        )
    if layer.kv_sharing_target_layer_name is not None:
        return f"shares the KV of {layer.kv_sharing_target_layer_name}"
    if layer.attn_type != "decoder":
        return f"is of type {layer.attn_type}"
    if (layer.head_size, layer.head_size_v) != (identity.key_dim, identity.value_dim):
        return (
            f"has heads of {layer.head_size} and {layer.head_size_v} numbers, the model's configuration says "
            f"{identity.key_dim} and {identity.value_dim}"
        )
    return None
