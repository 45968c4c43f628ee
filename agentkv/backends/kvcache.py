"""The KV cache of one token sequence, held so that it can grow, be cut and be copied.

It wraps the cache class of transformers and replaces its layers where a better one is known: the stock
layer copies all its keys and values for each new token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from agentkv.kv.spans import KVSpan

_ROUND = 64
# Layers without KV of their own have a class only in later versions of transformers.
_HOLDS_NOTHING = getattr(cache_utils, "DummyLayer", ())


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no type information
    """Keys and values of one attention layer in a buffer with room to grow.

    ``keys`` and ``values`` are views of shape ``[1, kv_heads, length, head_dim]`` on buffers of shape
    ``[1, kv_heads, capacity, head_dim]``: a new token is written in place, and cutting moves only the end.
    The layer keeps every position, also for attention with a sliding window: the window is then a matter of
    the attention mask alone.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._length = 0
        self._room = 0
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers, of the dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = (
            _with_room(key_states[:, :, :0], self._room),
            _with_room(value_states[:, :, :0], self._room),
        )
        self.is_initialized = True
        self._show(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states of shape ``[1, kv_heads, new, head_dim]`` and return views of all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[-2]
        self.reserve(end)
        keys, values = self._initialized()
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return self._show(end)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add states of shape ``[1, kv_heads, new, head_dim]`` that did not come from the model just now.

        Raises
        ------
        ValueError
            They are of another shape. Assigning them could repeat a single head for all.
        """
        for held, new in zip(self._buffers or (), (keys, values), strict=False):
            if (held.shape[1], held.shape[3]) != (new.shape[1], new.shape[3]):
                raise ValueError(f"states {list(new.shape)} do not fit a cache of {list(held.shape)}")
        self.update(keys, values)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens; once out of room, an eighth more than asked is taken."""
        if self._buffers is None:
            self._room = max(self._room, length)
            return
        keys, values = self._buffers
        if length <= keys.shape[-2]:
            return
        room = length + length // 8
        keys = _with_room(keys[:, :, : self._length], room)
        values = _with_room(values[:, :, : self._length], room)
        self._buffers = (keys, values)
        self._show(self._length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; nothing is copied."""
        if self.is_initialized:
            self._show(min(length, self._length))

    def copy(self, length: int) -> GrowingLayer:
        """Copy the first `length` tokens into a layer of its own."""
        made = GrowingLayer()
        if self._buffers is not None:
            made.dtype, made.device = self.dtype, self.device
            keys, values = self._buffers
            room = length + length // 8
            made._buffers = (_with_room(keys[:, :, :length], room), _with_room(values[:, :, :length], room))
            made.is_initialized = True
            made._show(length)
        return made

    def get_seq_length(self) -> int:
        """Count the tokens held."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens (transformers counts them negatively)."""
        self.truncate(self._length - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget all tokens and the buffers."""
        self._buffers = None
        self._length = 0
        super().reset()

    def _initialized(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            raise RuntimeError("a cache layer was used before its first states were written")
        return self._buffers

    def _show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._initialized()
        self._length = length
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        return self.keys, self.values


class ModelKV:
    """The KV of one sequence of tokens for all layers of a model.

    Parameters
    ----------
    config
        Configuration of the model; its layer types decide which cache layers are made.
    cache
        An existing cache that holds `length` tokens, to be owned by this object.
    length
        Tokens held, 0 for a new one.
    """

    def __init__(self, config: Any, cache: Cache | None = None, length: int = 0) -> None:
        self._config = config
        self.cache = _new_cache(config) if cache is None else cache
        self.length = length

    @property
    def any_prefix(self) -> bool:
        """Whether it can be cut anywhere; a recurrent state, for one, holds its last token only."""
        return all(isinstance(layer, (GrowingLayer, _HOLDS_NOTHING)) for layer in self.cache.layers)

    def reusable(self, common: int) -> int:
        """Count the tokens that a sequence sharing the first `common` ones can take over."""
        if self.any_prefix:
            return min(common, self.length)
        return self.length if common >= self.length else 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, in place.

        Raises
        ------
        ValueError
            `reusable` does not allow it.
        """
        self._check(length)
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.truncate(length)
        self.length = length

    @torch.inference_mode()
    def copy(self, length: int) -> ModelKV:
        """Copy the first `length` tokens.

        Raises
        ------
        ValueError
            `reusable` does not allow it.
        """
        self._check(length)
        if not self.any_prefix:
            return ModelKV(self._config, copy.deepcopy(self.cache), length)
        made = ModelKV(self._config)
        made.cache.layers = [
            layer.copy(length) if isinstance(layer, GrowingLayer) else copy.deepcopy(layer)
            for layer in self.cache.layers
        ]
        made.length = length
        return made

    @property
    def joinable(self) -> bool:
        """Whether every layer holds keys and values of its own, token by token."""
        return all(isinstance(layer, GrowingLayer) for layer in self.cache.layers)

    @torch.inference_mode()
    def span(self, start: int, stop: int) -> KVSpan:
        """Copy the KV of tokens ``[start, stop)``.

        Raises
        ------
        ValueError
            It does not hold them, or is not `joinable`.
        """
        from agentkv.kv.spans import KVSpan, LayerKV

        if not self.joinable or not 0 <= start < stop <= self.length:
            raise ValueError(f"a cache of {self.length} tokens has no KV of tokens {start} to {stop} to copy")
        layers = tuple(
            LayerKV(layer.keys[0, :, start:stop].clone(), layer.values[0, :, start:stop].clone())
            for layer in self.cache.layers
        )
        return KVSpan(layers, start)

    @torch.inference_mode()
    def append(self, span: KVSpan) -> None:
        """Add tokens computed elsewhere, whose keys stand for the positions that follow.

        Raises
        ------
        ValueError
            It is for other positions or shapes. Nothing was added.
        """
        start = self.length
        if not self.joinable or span.position != start or len(span.layers) != len(self.cache.layers):
            raise ValueError(
                f"KV of {len(span.layers)} layers for position {span.position} does not continue a cache of "
                f"{len(self.cache.layers)} layers and {start} tokens"
            )
        self.reserve(start + len(span))
        try:
            for layer, states in zip(self.cache.layers, span.layers, strict=True):
                layer.append(states.keys[None], states.values[None])
        except BaseException:
            self.truncate(start)
            raise
        self.length = start + len(span)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens at once, so that growing copies nothing."""
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.reserve(length)

    def observed_length(self) -> int:
        """Count the tokens from the tensors themselves, where the layers say it."""
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                return layer.get_seq_length()
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, unused room included; shared storage counts once."""
        storages = {}
        for layer in self.cache.layers:
            for tensor in _tensors(vars(layer)):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def _check(self, length: int) -> None:
        if self.reusable(length) != length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cut to {length}")


def _new_cache(config: Any) -> Cache:
    cache = DynamicCache(config=config)
    # The exact types: a subclass holds more than keys and values, and its owner alone knows how to cut it.
    cache.layers = [
        GrowingLayer() if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache


def _with_room(states: torch.Tensor, room: int) -> torch.Tensor:
    """Copy states of shape ``[1, heads, length, dim]`` into a buffer for at least `room` tokens."""
    batch, heads, length, dim = states.shape
    capacity = -(-max(room, length, 1) // _ROUND) * _ROUND
    buffer = states.new_empty((batch, heads, capacity, dim))
    buffer[:, :, :length] = states
    return buffer


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
