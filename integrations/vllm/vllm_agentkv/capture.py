"""Catching the KV that the engine computes for a chunk, on its way into the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentkv.kv import KVSpan, LayerKV
from vllm_agentkv.work import Capture, Chunk

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

Caught = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer's index, its keys and values ``[tokens, heads, dim]``, and the slot of each token."""


def listen(layers: Sequence[Attention], caught: Caught) -> None:
    """Have `caught` called with all that is written into the paged cache during a forward pass.

    Each layer's `do_kv_cache_update` is wrapped. It is called from within a custom operator, so it runs with
    ``torch.compile`` too; full CUDA graphs skip it, which is why the connector asks for piecewise ones.
    """
    for index, layer in enumerate(layers):
        _wrap(layer.impl, index, caught)


def _wrap(impl: Any, index: int, caught: Caught) -> None:
    original = impl.do_kv_cache_update

    def update(
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        original(layer, key, value, kv_cache, slot_mapping)
        caught(index, key, value, slot_mapping)

    impl.do_kv_cache_update = update


class Recording:
    """What was caught of one chunk so far: a buffer for each layer, and which of its rows are filled."""

    def __init__(self, chunk: Chunk, layers: int) -> None:
        self.chunk = chunk
        self._buffers: list[LayerKV | None] = [None] * layers
        self._filled = torch.zeros(layers, len(chunk.ids), dtype=torch.bool)

    def add(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep tokens of a layer.

        Parameters
        ----------
        rows
            Index in the chunk of each, int64.
        keys, values
            ``[tokens, heads, dim]``.
        """
        buffer = self._buffers[layer]
        if buffer is None:
            shape = (len(self.chunk.ids), keys.shape[1])
            buffer = LayerKV(
                torch.zeros(*shape, keys.shape[2], dtype=keys.dtype).transpose(0, 1),
                torch.zeros(*shape, values.shape[2], dtype=values.dtype).transpose(0, 1),
            )
            self._buffers[layer] = buffer
        buffer.keys[:, rows] = keys.transpose(0, 1).cpu()
        buffer.values[:, rows] = values.transpose(0, 1).cpu()
        self._filled[layer, rows] = True

    @property
    def missing(self) -> int:
        """Rows of layers that were never caught."""
        return int((~self._filled).sum())

    @property
    def rows(self) -> int:
        """Rows of all layers together."""
        return self._filled.numel()

    def span(self) -> KVSpan:
        """Return the whole chunk's KV, ``[heads, tokens, dim]`` in each layer, behind its anchor."""
        layers = tuple(
            LayerKV(buffer.keys.contiguous(), buffer.values.contiguous())
            for buffer in self._buffers
            if buffer is not None
        )
        return KVSpan(layers, len(self.chunk.anchor))


class Step:
    """Sorts what is written in one step to the recordings that want a part of it."""

    def __init__(self, captures: Sequence[Capture], recordings: dict[str, Recording]) -> None:
        self._recordings = [recordings[capture.request] for capture in captures]
        slots = [(slot, owner, capture.first + row) for owner, capture in enumerate(captures)
                 for row, slot in enumerate(capture.slots)]  # fmt: skip
        slots.sort()
        self._slots = torch.tensor([slot for slot, _, _ in slots], dtype=torch.int64)
        self._owners = torch.tensor([owner for _, owner, _ in slots], dtype=torch.int64)
        self._rows = torch.tensor([row for _, _, row in slots], dtype=torch.int64)
        self._mapping: torch.Tensor | None = None
        self._targets: list[tuple[Recording, torch.Tensor, torch.Tensor]] = []

    def caught(self, layer: int, keys: torch.Tensor, values: torch.Tensor, mapping: torch.Tensor) -> None:
        """Keep what is wanted of a layer's write; `mapping` says the slot of each of its tokens."""
        if self._mapping is not mapping:
            # One mapping serves all layers of a step, or of a part of a step that runs in parts.
            self._mapping, self._targets = mapping, self._match(mapping.cpu())
        for recording, batch_rows, chunk_rows in self._targets:
            rows = batch_rows.to(keys.device)
            recording.add(layer, chunk_rows, keys[rows], values[rows])

    def _match(self, mapping: torch.Tensor) -> list[tuple[Recording, torch.Tensor, torch.Tensor]]:
        at = torch.searchsorted(self._slots, mapping).clamp(max=len(self._slots) - 1)
        hits = (self._slots[at] == mapping).nonzero().flatten()
        found = at[hits]
        targets = []
        for owner, recording in enumerate(self._recordings):
            mine = self._owners[found] == owner
            if bool(mine.any()):
                targets.append((recording, hits[mine], self._rows[found[mine]]))
        return targets
