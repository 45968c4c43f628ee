"""Tiny models with random weights, made from a configuration, and a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPTJConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
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
    "llama_linear": lambda: LlamaConfig(
        **_COMMON, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
    ),
    "llama_llama3": lambda: LlamaConfig(
        **_COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 4.0,
            "rope_theta": 1000.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "llama_yarn": lambda: LlamaConfig(
        **_COMMON,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1000.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "phi_partial": lambda: PhiConfig(
        **_COMMON,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    ),
    "gemma3_local_global": lambda: Gemma3TextConfig(
        **_COMMON,
        sliding_window=WINDOW,
        layer_types=_LAYER_TYPES,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    ),
    "smollm3_without_positions": lambda: SmolLM3Config(**_COMMON, no_rope_layers=[1, 1, 1, 0]),
    "cohere2_without_positions": lambda: Cohere2Config(
        **_COMMON, sliding_window=WINDOW, layer_types=_LAYER_TYPES
    ),
    "cohere_pairs": lambda: CohereConfig(**_COMMON),
    "gptj_partial_pairs": lambda: GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=4,
        n_head=4,
        rotary_dim=4,
        n_positions=512,
        bos_token_id=257,
        eos_token_id=END,
        initializer_range=0.3,
    ),
    "deepseek_latent": lambda: DeepseekV3Config(
        **{
            **{name: value for name, value in _COMMON.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
}

CUT_ANYWHERE = ("llama", "qwen3", "mistral_sliding", "gemma3_sliding")
"""Models whose KV can be reused up to any token."""
ROTARY = (
    "llama",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "phi_partial",
    "gemma3_local_global",
    "smollm3_without_positions",
    "cohere2_without_positions",
    "cohere_pairs",
    "gptj_partial_pairs",
    "deepseek_latent",
)
"""One model for each kind of rotary positions."""
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
