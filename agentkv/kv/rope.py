"""Moving keys to other positions.

A rotary position embedding turns pairs of a key's numbers by the angle ``position * inv_freq``. Angles add,
so tokens are moved by `delta` positions with one turn by ``delta * inv_freq``, the same for all of them:
nothing has to be turned back first.

RoPE: arXiv 2104.09864. YaRN: arXiv 2309.00071. Moving compiled chunks: arXiv 2606.17107.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentkv.errors import CapabilityError


class Rotation(BaseModel):
    """How the keys of a layer are turned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["default", "linear", "llama3", "yarn"]
    theta: float = Field(gt=1, allow_inf_nan=False)
    """Base of the frequencies."""
    part: Literal["keys", "values"] = "keys"
    """Which of the two cached tensors holds the turned numbers. Multi-head latent attention caches latents as
    keys, and the rotary part as values."""
    dim: int = Field(ge=2)
    """Numbers of one token and head in that tensor."""
    start: int = Field(default=0, ge=0)
    """The first number that is turned."""
    size: int = Field(ge=2, multiple_of=2)
    """How many are turned."""
    interleaved: bool = False
    """Whether neighbours are a pair, as in GPT-J; otherwise number ``i`` goes with ``i + size / 2``, as in
    Llama."""
    factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How much longer the context was made; 1 for *default*."""
    original_window: int | None = Field(default=None, ge=1)
    """Tokens of the context before that; for *llama3* and *yarn*."""
    low_freq_factor: float | None = None
    """For *llama3*."""
    high_freq_factor: float | None = None
    """For *llama3*."""
    beta_fast: float | None = None
    """For *yarn*."""
    beta_slow: float | None = None
    """For *yarn*."""
    truncate: bool = True
    """For *yarn*: whether the bounds of its ramp are whole numbers."""
    attention_factor: float = Field(default=1.0, allow_inf_nan=False)
    """What *yarn* multiplies the turned numbers with. A turn keeps it; keys of another factor differ."""

    @model_validator(mode="after")
    def _complete(self) -> Rotation:
        if self.start + self.size > self.dim:
            raise ValueError(f"numbers [{self.start}, {self.start + self.size}) are beyond dim {self.dim}")
        needed = {
            "default": (),
            "linear": (),
            "llama3": ("original_window", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_window", "beta_fast", "beta_slow"),
        }
        missing = [name for name in needed[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"type {self.type} needs {', '.join(missing)}")
        return self


class RopeSpec(BaseModel):
    """The rotary positions of a model, layer by layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    rotations: tuple[Rotation, ...]
    """The different ones."""
    layers: tuple[int | None, ...]
    """For each layer the index of its rotation; None for a layer without positions."""

    @model_validator(mode="after")
    def _in_range(self) -> RopeSpec:
        for layer, index in enumerate(self.layers):
            if index is not None and not 0 <= index < len(self.rotations):
                raise ValueError(f"layer {layer} has rotation {index} of {len(self.rotations)}")
        return self

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RopeSpec:
        """Read it from the configuration of a language model.

        Parameters
        ----------
        config
            ``config.get_text_config(decoder=True).to_dict()`` of transformers, or a ``config.json`` that says
            as much; ``rope_parameters`` and the older ``rope_theta`` with ``rope_scaling`` are understood.

        Raises
        ------
        CapabilityError
            Its keys cannot be moved by a turn, or it is not known whether they can.
        """
        from agentkv.kv.geometry import rope_spec

        return rope_spec(config)

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of a layer; None for a layer without positions."""
        index = self.layers[layer]
        return None if index is None else self.rotations[index]

    def inv_freq(self, layer: int) -> torch.Tensor | None:
        """Radians per position of each pair, float32 of shape ``[size / 2]``; None without positions."""
        rotation = self.rotation(layer)
        return None if rotation is None else _inv_freq(rotation).clone()

    def in_layout(self, *, interleaved: bool) -> RopeSpec:
        """The same positions where a runtime caches its pairs in another order than transformers does."""
        rotations = tuple(
            rotation.model_copy(update={"interleaved": interleaved}) for rotation in self.rotations
        )
        return self.model_copy(update={"rotations": rotations})


def rotate(keys: torch.Tensor, delta: int, spec: RopeSpec, layer: int) -> torch.Tensor:
    """Move cached keys by a number of positions.

    Parameters
    ----------
    keys
        The keys of `layer`, turned already: ``[..., dim]``, such as ``[kv_heads, tokens, head_dim]``. For
        multi-head latent attention, the tensor that `Rotation.part` names.
    delta
        Positions to move by; negative is towards the beginning.
    spec
        Rotary positions of the model.
    layer
        Index of the layer.

    Returns
    -------
    torch.Tensor
        Keys of the same shape and dtype; `keys` itself where nothing is to be turned.

    Raises
    ------
    CapabilityError
        The keys have another size than the configuration says.
    """
    rotation = spec.rotation(layer)
    if rotation is None or delta == 0:
        return keys
    if keys.shape[-1] != rotation.dim:
        raise CapabilityError(
            f"layer {layer} caches {keys.shape[-1]} numbers per head where {rotation.dim} were expected from "
            "the configuration: this version of the runtime lays its cache out otherwise, so it is not moved"
        )
    # In float64, because an angle of many turns leaves float32 few digits for the rest.
    angle = _inv_freq(rotation).double() * delta
    cos = angle.cos().to(keys.device, torch.float32)
    sin = angle.sin().to(keys.device, torch.float32)
    turned = keys.clone()
    x, y = (numbers.float() for numbers in _pairs(keys, rotation))
    one, other = _pairs(turned, rotation)
    one.copy_(x * cos - y * sin)
    other.copy_(y * cos + x * sin)
    return turned


def _pairs(keys: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second number of each pair."""
    window = keys[..., rotation.start : rotation.start + rotation.size]
    if rotation.interleaved:
        return window[..., 0::2], window[..., 1::2]
    half = rotation.size // 2
    return window[..., :half], window[..., half:]


@lru_cache(maxsize=64)
def _inv_freq(rotation: Rotation) -> torch.Tensor:
    exponents = torch.arange(0, rotation.size, 2, dtype=torch.float32) / rotation.size
    plain = 1.0 / (rotation.theta**exponents)
    if rotation.type == "llama3":
        return _llama3(plain, rotation)
    if rotation.type == "yarn":
        return _yarn(plain, rotation)
    return plain / rotation.factor


def _llama3(plain: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, and those between are blended."""
    low, high, window = rotation.low_freq_factor, rotation.high_freq_factor, rotation.original_window
    if low is None or high is None or window is None:
        raise CapabilityError(f"the llama3 rotation {rotation!r} lacks its factors")
    turns = window * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / rotation.factor * (1 - kept) + plain * kept


def _yarn(plain: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """As llama3, blended by the index of the pair instead of the frequency."""
    fast, slow, window = rotation.beta_fast, rotation.beta_slow, rotation.original_window
    if fast is None or slow is None or window is None:
        raise CapabilityError(f"the yarn rotation {rotation!r} lacks its bounds")
    size = rotation.size
    first, last = (
        size * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(rotation.theta))
        for turns in (fast, slow)
    )
    if rotation.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # Equal bounds are a step.
    width = (last - first) or 0.001
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / rotation.factor * (1 - kept) + plain * kept
