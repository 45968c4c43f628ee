"""What a loaded model says about itself: read from its configuration and signature, never from its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from agentkv.errors import CapabilityError, ConfigurationError

_CHANGE_NO_WEIGHTS: Final = frozenset(
    {"attn_implementation", "device_map", "low_cpu_mem_usage", "max_memory", "revision", "token"}
)
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


def forward_arguments(model: Any) -> tuple[str, dict[str, Any]]:
    """Name the argument of ``forward`` that takes the cache, and give those that never change.

    Raises
    ------
    CapabilityError
        The model takes no cache.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            fixed: dict[str, Any] = {"use_cache": True}
            if "logits_to_keep" in parameters:
                fixed["logits_to_keep"] = 1
            return name, fixed
    raise CapabilityError(
        f"{type(model).__name__}.forward takes neither 'cache' nor 'past_key_values': its KV cannot be kept, "
        "so this model cannot be run here"
    )


def generation_eos(model: Any) -> frozenset[int]:
    """Ids that end a generation, by the model's generation configuration."""
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def context_window_of(config: Any) -> int:
    """Most tokens of prompt and answer together.

    Raises
    ------
    ConfigurationError
        The configuration does not say.
    """
    window = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if window is None:
        raise ConfigurationError(
            f"{type(config).__name__} has no max_position_embeddings: give context_window, the most tokens "
            "of prompt and answer together"
        )
    return int(window)


def stable_length(config: Any) -> int | None:
    """Length up to which a token's KV is the same in every sequence; None if it always is.

    Dynamic and long RoPE change their frequencies once a sequence grows past the original window, and with
    them the KV of every token before: longer prompts are computed in one piece and not kept.
    """
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    lengths = [
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or context_window_of(config)
        for rope in per_layer_type or [parameters]
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    return min(lengths, default=None)


def default_dtype(device: str) -> torch.dtype | str:
    """Choose the dtype to load with: the checkpoint's, but on a CPU one that it has instructions for."""
    if not device.startswith("cpu"):
        return "auto"
    capabilities: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    known = capabilities()
    fast = known.get("avx512_bf16") or known.get("amx_bf16") or known.get("bf16")
    return torch.bfloat16 if fast else torch.float32


def weights_folder(name: str, options: Mapping[str, Any]) -> Path | None:
    """Folder with the files of a model that was loaded from `name`; None where something else runs."""
    # Adapters and quantisation change what runs, not the files.
    if set(options) - _CHANGE_NO_WEIGHTS:
        return None
    folder = Path(name)
    if not folder.is_dir():
        from transformers.utils import cached_file

        found = cached_file(name, "config.json", revision=options.get("revision"), local_files_only=True)
        folder = Path(str(found)).parent
    if (folder / "adapter_config.json").is_file() or not any(folder.glob("*.safetensors")):
        return None
    return folder
