"""Tiny models with random weights, made from a configuration, and a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCABULARY = 264
"""Bytes 0 to 255, then control tokens."""
END = 256
WINDOW = 16
"""Sliding window of the models that have one, in tokens."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": END,
    "pad_token_id": 258,
    "initializer_range": 0.3,
}
_LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
_RECURRENT_AND_FULL = ["linear_attention", "full_attention"] * 2

_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON),
    "mistral_sliding": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3_sliding": lambda: Gemma3TextConfig(**_COMMON, sliding_window=WINDOW, layer_types=_LAYER_TYPES),
    "qwen3_next_recurrent": lambda: Qwen3NextConfig(
        **_COMMON,
        layer_types=_RECURRENT_AND_FULL,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    ),
    "lfm2_convolution": lambda: Lfm2Config(**_COMMON, layer_types=["conv", "full_attention"] * 2),
    "llama_dynamic_rope": lambda: LlamaConfig(
        **_COMMON,
        rope_parameters={
            "rope_type": "dynamic",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
        },
    ),
}

CUT_ANYWHERE = ("llama", "qwen3", "mistral_sliding", "gemma3_sliding")
"""Models whose KV can be reused up to any token."""
WHOLE_ONLY = ("qwen3_next_recurrent", "lfm2_convolution")
"""Models with a state that holds the last token only."""


def tiny_model(name: str, seed: int = 0) -> Any:
    """Make a float32 model of four layers; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = _CONFIGS[name]()
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class ByteTokenizer:
    """Ids are the bytes of UTF-8; characters of several bytes take several tokens."""

    fingerprint = "bytes"
    control_tokens: Mapping[str, int] = {"<end>": END}
    eos_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def render(self, messages: Any, **options: Any) -> str:
        return "".join(str(message["content"]) for message in messages)


class Scripted(torch.nn.Module):
    """A real model whose logits are overruled, so that it says a given sequence; its KV stays real."""

    def __init__(self, script: Sequence[int], model: Any | None = None) -> None:
        super().__init__()
        self.inner = tiny_model("llama") if model is None else model
        self.config = self.inner.config
        self.generation_config = self.inner.generation_config
        self.script = list(script)
        self.passes: list[int] = []
        """Tokens of each pass through the model."""
        self.fail_at: int | None = None
        """The pass, from 0, in which to raise."""
        self.failure: BaseException = RuntimeError("out of memory")
        self.prompt_length = 0

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, cache: Any, use_cache: bool, logits_to_keep: int) -> Any:
        self.passes.append(input_ids.shape[1])
        output = self.inner(
            input_ids=input_ids, cache=cache, use_cache=use_cache, logits_to_keep=logits_to_keep
        )
        if self.fail_at == len(self.passes) - 1:
            raise self.failure
        said = cache.get_seq_length() - self.prompt_length
        token = self.script[said] if 0 <= said < len(self.script) else END
        output.logits = torch.zeros_like(output.logits)
        output.logits[..., token] = 10.0
        return output
