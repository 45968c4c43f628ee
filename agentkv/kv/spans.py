"""Keys and values of a run of tokens: cut, moved, joined, and split between the ranks of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from agentkv.errors import ConfigurationError
from agentkv.kv.rope import RopeSpec, rotate


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """What one layer caches of some tokens."""

    keys: torch.Tensor
    """``[kv_heads, tokens, key_dim]``."""
    values: torch.Tensor
    """``[kv_heads, tokens, value_dim]``."""

    def __post_init__(self) -> None:
        keys, values = self.keys.shape, self.values.shape
        if len(keys) != 3 or len(values) != 3 or keys[:2] != values[:2]:
            raise ConfigurationError(
                f"keys {list(keys)} and values {list(values)} do not fit; give [kv_heads, tokens, dim] each, "
                "of as many heads and tokens"
            )


@dataclass(frozen=True, slots=True, eq=False)
class KVSpan:
    """The KV of consecutive tokens in all layers. It is never changed: each method gives another."""

    layers: tuple[LayerKV, ...]
    position: int
    """Position for which the first token's keys are turned."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigurationError("a span of no layers was given; give what each layer cached")
        counts = {layer.keys.shape[1] for layer in self.layers}
        if len(counts) != 1:
            raise ConfigurationError(
                f"the layers hold {', '.join(map(str, sorted(counts)))} tokens; give as many in each"
            )
        if self.position < 0:
            raise ConfigurationError(f"position {self.position} is negative; give 0 or more")

    def __len__(self) -> int:
        """Count the tokens."""
        return int(self.layers[0].keys.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def slice(self, start: int, stop: int) -> KVSpan:
        """Take tokens ``[start, stop)``, as views.

        Raises
        ------
        ConfigurationError
            The span does not hold them.
        """
        if not 0 <= start <= stop <= len(self):
            raise ConfigurationError(f"tokens [{start}, {stop}) are not within a span of {len(self)}")
        layers = tuple(
            LayerKV(layer.keys[:, start:stop], layer.values[:, start:stop]) for layer in self.layers
        )
        return KVSpan(layers, self.position + start)

    def moved(self, position: int, rope: RopeSpec) -> KVSpan:
        """Turn the keys so that the first token stands at `position`.

        Raises
        ------
        CapabilityError
            The tensors have another size than `rope` says.
        ConfigurationError
            The position is negative, or `rope` is for another number of layers.
        """
        if len(rope.layers) != len(self.layers):
            raise ConfigurationError(
                f"a span of {len(self.layers)} layers cannot be moved with the rotary positions of "
                f"{len(rope.layers)}; take those of its own model"
            )
        delta = position - self.position
        layers = tuple(_turned(layer, delta, rope, index) for index, layer in enumerate(self.layers))
        return KVSpan(layers, position)

    def heads(self, rank: int, of: int) -> KVSpan:
        """Take the KV heads of one rank of `of` under tensor parallelism, as views.

        Where there are fewer heads than ranks, neighbouring ranks hold the same head.

        Raises
        ------
        ConfigurationError
            There is no such rank, or the heads cannot be shared out evenly.
        """
        layers = []
        for layer in self.layers:
            first, last = head_range(layer.keys.shape[0], rank, of)
            layers.append(LayerKV(layer.keys[first:last], layer.values[first:last]))
        return KVSpan(tuple(layers), self.position)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> KVSpan:
        """Convert to a dtype, a device, or both; nothing is copied where nothing changes."""
        layers = tuple(
            LayerKV(layer.keys.to(device=device, dtype=dtype), layer.values.to(device=device, dtype=dtype))
            for layer in self.layers
        )
        return replace(self, layers=layers)


def join(spans: Sequence[KVSpan]) -> KVSpan:
    """Put spans that follow one another into one.

    Raises
    ------
    ConfigurationError
        There is none, or one does not begin where the one before it ends.
    """
    if not spans:
        raise ConfigurationError("no spans were given to join; give at least one")
    for one, other in pairwise(spans):
        if other.position != one.position + len(one):
            raise ConfigurationError(
                f"a span at position {other.position} does not follow one that ends at "
                f"{one.position + len(one)}; move it there first"
            )
        if len(other.layers) != len(one.layers):
            raise ConfigurationError(
                f"spans of {len(one.layers)} and {len(other.layers)} layers cannot be joined"
            )
    layers = tuple(
        LayerKV(
            torch.cat([layer.keys for layer in pieces], dim=1),
            torch.cat([layer.values for layer in pieces], dim=1),
        )
        for pieces in zip(*(span.layers for span in spans), strict=True)
    )
    return KVSpan(layers, spans[0].position)


def head_range(heads: int, rank: int, of: int) -> tuple[int, int]:
    """First KV head of a rank and the one after its last, of `heads` in the whole model.

    Raises
    ------
    ConfigurationError
        There is no such rank, or the heads cannot be shared out evenly.
    """
    if not 0 <= rank < of:
        raise ConfigurationError(f"there is no rank {rank} of {of}; ranks count from 0")
    if heads >= of and heads % of == 0:
        each = heads // of
        return rank * each, (rank + 1) * each
    if heads < of and of % heads == 0:
        head = rank * heads // of
        return head, head + 1
    raise ConfigurationError(f"{heads} KV heads cannot be shared out evenly over {of} ranks")


def _turned(layer: LayerKV, delta: int, rope: RopeSpec, index: int) -> LayerKV:
    rotation = rope.rotation(index)
    if rotation is None:
        return layer
    if rotation.part == "values":
        return LayerKV(layer.keys, rotate(layer.values, delta, rope, index))
    return LayerKV(rotate(layer.keys, delta, rope, index), layer.values)
