"""Which model a server runs, in the words that its artifacts are named by.

Both halves of the connector compute it, each by itself, from the configuration and the weights' folder. A
reload of other weights into a running engine cannot be seen from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from agentkv.errors import CapabilityError
from agentkv.kv import ModelIdentity, RopeSpec, tokenizer_digest, weights_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_DTYPES = ("float32", "bfloat16", "float16")
_OTHER_ORDER = ("llama4", "deepseek")
"""Families whose key numbers vLLM keeps in another order than transformers, by which `RopeSpec` goes."""


def identity_of(config: ModelConfig) -> ModelIdentity:
    """Return the identity of the model that `config` describes.

    Raises
    ------
    CapabilityError
        Its rotary positions or its number format cannot be spliced.
    ModelNotFoundError
        Its weights or its tokenizer are not on disk.
    """
    text = config.hf_text_config
    architectures = config.hf_config.architectures or [config.architecture]
    weights = _folder(config.model, config.revision)
    tokenizer = _folder(config.tokenizer or config.model, config.tokenizer_revision)
    rope = rope_of(config)
    return ModelIdentity(
        architecture=architectures[0],
        weights=weights_digest(weights),
        tokenizer=tokenizer_digest(tokenizer),
        revision=None if weights == Path(config.model) else config.revision,
        layers=len(rope.layers),
        kv_heads=config.get_total_num_kv_heads(),
        key_dim=config.get_head_size(),
        value_dim=getattr(text, "v_head_dim", None) or config.get_head_size(),
        dtype=_dtype(str(config.dtype)),
        rope=rope.model_dump(mode="json"),
    )


def rope_of(config: ModelConfig) -> RopeSpec:
    """Return the rotary positions of a model's layers.

    Raises
    ------
    CapabilityError
        They cannot be spliced.
    """
    text = config.hf_text_config.to_dict()
    family = str(text.get("model_type", ""))
    if family.startswith(_OTHER_ORDER):
        raise CapabilityError(
            f"models of type {family} cannot be spliced: vLLM keeps the rotary numbers of a key in another "
            "order than the one that artifacts are turned in"
        )
    return RopeSpec.of(text)


def _dtype(torch_name: str) -> Literal["float32", "bfloat16", "float16"]:
    name = torch_name.removeprefix("torch.")
    if name not in _DTYPES:
        raise CapabilityError(
            f"KV of {name} cannot be spliced; start the server with --dtype {' or '.join(_DTYPES)}"
        )
    return cast(Literal["float32", "bfloat16", "float16"], name)


def _folder(name: str, revision: str | None) -> Path:
    """Find a folder, or the local copy of a hub's model that the server has loaded."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
