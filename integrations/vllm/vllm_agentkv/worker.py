"""The worker's half of the connector: loads artifacts into the paged cache, and catches what is compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from agentkv.errors import AgentKVError
from agentkv.kv import ArtifactHeader, ArtifactStore, ModelIdentity
from vllm_agentkv.capture import Recording, Step, listen
from vllm_agentkv.choosing import slots_of
from vllm_agentkv.layers import write
from vllm_agentkv.loading import Tiers
from vllm_agentkv.messages import StepOrders, StepResults
from vllm_agentkv.metrics import LOAD_FAILURES, READS, SPLICES, TOKENS, SpliceStats
from vllm_agentkv.options import Switch
from vllm_agentkv.work import Capture, Failed, Load, Written

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.attention import Attention

    from vllm_agentkv.options import SpliceOptions

logger = logging.getLogger("vllm.agentkv")


class SpliceWorker:
    """One rank's work in each step.

    Parameters
    ----------
    layers
        The model's attention layers.
    store, identity, options
        As in the scheduler's half.
    block_size
        Tokens of a block of the paged cache.
    rank, of
        Place of this rank under tensor parallelism.
    """

    def __init__(
        self,
        layers: Sequence[Attention],
        store: ArtifactStore,
        identity: ModelIdentity,
        options: SpliceOptions,
        *,
        block_size: int,
        rank: int,
        of: int,
    ) -> None:
        self._layers = layers
        self._store = store
        self._identity = identity
        self._block_size = block_size
        self._tiers = Tiers(store, identity, rank=rank, of=of, most=options.ram_bytes)
        self._stats = SpliceStats()
        self._broken_blocks: set[int] = set()
        self._recordings: dict[str, Recording] = {}
        self._step: Step | None = None
        self._writing: dict[str, Future[Written]] = {}
        self._failed: dict[str, Failed] = {}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentkv-write")
        if options.compile is Switch.ON:
            listen(layers, self._caught)

    def begin(self, orders: StepOrders) -> None:
        """Prepare for what the step's forward pass writes."""
        for request in orders.dropped:
            self._recordings.pop(request, None)
        for capture in orders.captures:
            if capture.request not in self._recordings:
                self._recordings[capture.request] = Recording(capture.chunk, len(self._layers))
        wanted = [capture for capture in orders.captures if capture.slots]
        self._step = Step(wanted, self._recordings) if wanted else None

    def load(self, loads: Sequence[Load]) -> None:
        """Write artifacts into the paged cache; what fails is reported by its blocks."""
        for load in loads:
            try:
                span, tiers = self._tiers.placed(load.pieces, load.sources)
                start, stop = load.pieces[0].start, load.pieces[-1].stop
                write(self._layers, span, slots_of(load.blocks, start, stop, self._block_size))
            except (AgentKVError, OSError, RuntimeError):
                logger.exception("request %s failed: its artifacts cannot be loaded", load.request)
                self._broken_blocks.update(load.blocks[load.pieces[0].start // self._block_size :])
                self._stats.count(LOAD_FAILURES)
                continue
            self._stats.count(SPLICES, by=len(load.pieces))
            self._stats.count(TOKENS, by=stop - start)
            for tier in tiers:
                self._stats.count(READS, tier.value)

    def end(self, captures: Sequence[Capture]) -> None:
        """Have chunks written whose last tokens the step computed."""
        self._step = None
        for capture in captures:
            if not capture.last:
                continue
            recording = self._recordings.pop(capture.request, None)
            if recording is None:
                continue
            if recording.missing:
                self._failed[capture.request] = Failed(
                    f"{recording.missing} of {recording.rows} rows of KV were not seen while the chunk was "
                    f"computed; send it again, and report it if that does not help"
                )
            else:
                self._writing[capture.request] = self._threads.submit(self._write, recording)

    def take_results(self) -> StepResults | None:
        """Return which chunks are done, for better or worse."""
        compiled: dict[str, Written | Failed] = dict(self._failed)
        self._failed = {}
        for request, future in list(self._writing.items()):
            if not future.done():
                continue
            del self._writing[request]
            error = future.exception()
            if error is None:
                compiled[request] = future.result()
            else:
                logger.error("compiling for request %s failed", request, exc_info=error)
                compiled[request] = Failed(f"the artifact could not be written: {error}")
        return StepResults(compiled) if compiled else None

    def take_broken_blocks(self) -> set[int]:
        """Return blocks whose KV could not be loaded."""
        broken, self._broken_blocks = self._broken_blocks, set()
        return broken

    def take_stats(self) -> SpliceStats | None:
        """Return what was counted since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Finish what is being written."""
        self._threads.shutdown(wait=True)

    def _caught(self, layer: int, keys: torch.Tensor, values: torch.Tensor, mapping: torch.Tensor) -> None:
        if self._step is not None:
            self._step.caught(layer, keys, values, mapping)

    def _write(self, recording: Recording) -> Written:
        chunk = recording.chunk
        span = recording.span()
        header = ArtifactHeader.of(
            span, tenant=chunk.tenant, identity=self._identity, anchor=chunk.anchor, ids=chunk.ids
        )
        name = self._store.save(header, span)
        return Written(name, self._store.nbytes(name))
