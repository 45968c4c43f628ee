"""What the KV of a loaded model depends on, and how its keys are moved: read, then measured."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from agentkv.backends.kvcache import ModelKV
from agentkv.backends.model_traits import context_window_of, forward_arguments
from agentkv.errors import CapabilityError
from agentkv.kv.identity import ModelIdentity, tokenizer_digest, weights_digest
from agentkv.kv.rope import RopeSpec

if TYPE_CHECKING:
    from agentkv.kv.spans import KVSpan
    from agentkv.tokenizer import ChatTokenizer

_EDGE: Final = 4096
_FAR: Final = 4096
_NEAR: Final = 8
# Half precision rounds the angles' cosines to three digits; a wrong pair or frequency is off by far more.
_TOLERANCE: Final = 0.03
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class MovableKV:
    """How a model's KV is moved, and a sample of it."""

    rope: RopeSpec
    sample: KVSpan
    """The KV of one token at two positions."""


def movable_kv(model: Any) -> MovableKV:
    """Read how the keys of a model are turned, and check it on the model itself.

    Raises
    ------
    CapabilityError
        Its KV cannot be moved, is not kept token by token, or turns otherwise than its configuration says.
    """
    config = model.config
    name = type(model).__name__
    rope = RopeSpec.of(config.get_text_config(decoder=True).to_dict())
    kv = ModelKV(config)
    if not kv.joinable:
        raise CapabilityError(
            f"{name} cannot be spliced: not every layer keeps keys and values of its own for each token; "
            "leave out artifacts"
        )
    far = _run_one_token_twice(model, kv)
    sample = kv.span(0, kv.length)
    first, last = sample.slice(0, 1), sample.slice(kv.length - 1, kv.length)
    moved = first.moved(far, rope)
    # Equal tokens attend to equal values: what a layer caches of them differs by the turn alone. The first
    # layer of each rotation is enough, and later ones may have sinks, which tell the tokens apart.
    for layer in sorted({rope.layers.index(rotation) for rotation in rope.layers}):
        one, other = moved.layers[layer], last.layers[layer]
        if not (_alike(one.keys, other.keys) and _alike(one.values, other.values)):
            raise CapabilityError(
                f"{name} cannot be spliced: the KV of layer {layer}, moved by {far} positions as its "
                "configuration says, is not what the model computes there; leave out artifacts"
            )
    return MovableKV(rope, sample)


def identity_of(
    model: Any, tokenizer: ChatTokenizer, movable: MovableKV, folder: str | Path | None
) -> ModelIdentity:
    """Return what the KV of a model depends on.

    Parameters
    ----------
    folder
        Holds the files of exactly these weights and this tokenizer; None takes digests of what is in memory.

    Raises
    ------
    CapabilityError
        Its layers cache different shapes, or another type than float32, bfloat16 or float16.
    ModelNotFoundError
        The folder lacks weights or tokenizer.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    layers = movable.sample.layers
    shapes = {
        (layer.keys.shape[0], layer.keys.shape[-1], layer.values.shape[-1], layer.keys.dtype)
        for layer in layers
    }
    heads, key_dim, value_dim, dtype = min(shapes, key=str)
    if len(shapes) > 1 or dtype not in _DTYPES:
        found = ", ".join(sorted(f"{h} heads of {k} and {v} in {d}" for h, k, v, d in shapes))
        raise CapabilityError(
            f"{type(model).__name__} cannot be spliced: its layers cache {found}; artifacts hold one shape, "
            "in float32, bfloat16 or float16"
        )
    architectures = getattr(text, "architectures", None) or getattr(config, "architectures", None)
    return ModelIdentity.model_validate(
        {
            "architecture": architectures[0] if architectures else type(model).__name__,
            "weights": weights_in_memory(model) if folder is None else weights_digest(folder),
            "tokenizer": _tokenizer_in_memory(tokenizer) if folder is None else tokenizer_digest(folder),
            "revision": getattr(config, "_commit_hash", None),
            "layers": len(layers),
            "kv_heads": heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "dtype": _DTYPES[dtype],
            "rope": movable.rope.model_dump(mode="json"),
        }
    )


def weights_in_memory(model: Any) -> str:
    """Digest of a model's weights as they are now, in hex, from the first and last 4 KiB of each tensor."""
    digest = hashlib.sha256(b"agentkv-weights-in-memory/1")
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        edge = max(1, _EDGE // max(1, flat.element_size()))
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for part in (flat[:edge], flat[-edge:]):
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference, size = (torch.linalg.vector_norm(states.float()) for states in (one - other, other))
    return bool(difference <= _TOLERANCE * size)


def _tokenizer_in_memory(tokenizer: ChatTokenizer) -> str:
    return hashlib.sha256(b"agentkv-tokenizer/1 " + tokenizer.fingerprint.encode()).hexdigest()


@torch.inference_mode()
def _run_one_token_twice(model: Any, kv: ModelKV) -> int:
    """Pass one token through a model at position 0 and far from it; returns the last position."""
    embeddings = model.get_input_embeddings().weight
    # Not one of the first or last ids: padding may be embedded as zeros, which no turn changes.
    token = embeddings.shape[0] // 2
    argument, fixed = forward_arguments(model)
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = [0, min(context_window_of(model.config), _FAR) - 1]
        fixed["position_ids"] = torch.tensor([positions], device=embeddings.device)
    else:
        positions = list(range(_NEAR))
    input_ids = torch.full((1, len(positions)), token, device=embeddings.device)
    model(input_ids=input_ids, **{argument: kv.cache}, **fixed)
    kv.length = len(positions)
    return positions[-1]
