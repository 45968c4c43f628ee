"""The connector as vLLM sees it: a thin shell over its two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from agentkv.kv import ArtifactStore
from vllm_agentkv.checks import check_partners, check_server
from vllm_agentkv.identity import identity_of
from vllm_agentkv.layers import attention_layers
from vllm_agentkv.messages import StepOrders, StepResults
from vllm_agentkv.metrics import SpliceCounters, SpliceStats
from vllm_agentkv.options import read_options
from vllm_agentkv.scheduler import SpliceScheduler
from vllm_agentkv.worker import SpliceWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SpliceConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads compiled chunks at any place of a prompt; see the README for its options.

    vLLM makes one for the scheduler and one for each worker. Each computes the model's identity when it
    starts; weights that are exchanged in the running engine make it wrong, so restart the server instead.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        identity = identity_of(vllm_config.model_config)
        check_server(vllm_config, kv_cache_config, options, vllm.__version__, identity.dtype)
        options.store.mkdir(parents=True, exist_ok=True)
        store = ArtifactStore(options.store, key=options.signing_key.read() if options.signing_key else None)
        block_size = vllm_config.cache_config.block_size
        self._scheduler: SpliceScheduler | None = None
        self._worker: SpliceWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SpliceScheduler(store, identity, options, block_size=block_size)
            return
        from vllm.config import get_current_vllm_config_or_none
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        # Within a MultiConnector, `vllm_config` names this connector alone: the server's own names all.
        whole = get_current_vllm_config_or_none() or vllm_config
        check_partners(whole.kv_transfer_config, options)
        self._worker = SpliceWorker(
            attention_layers(vllm_config, identity),
            store,
            identity,
            options,
            block_size=block_size,
            rank=get_tensor_model_parallel_rank(),
            of=get_tensor_model_parallel_world_size(),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A request hands nothing on: what could not be spliced is computed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs replay without Python, so nothing that is compiled would be caught."""
        return True

    # The scheduler's half.

    def on_new_request(self, request: Request) -> None:
        """Look at a request that came in."""
        self._scheduling.arrive(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens are loaded behind those that are cached."""
        return self._scheduling.loadable(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take note of the blocks that a request was given."""
        self._scheduling.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Say what the workers do in this step."""
        return self._scheduling.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what the workers have done."""
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, StepResults):
            self._scheduling.hear(results)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Answer a request that ends; its blocks may be freed."""
        return False, self._scheduling.leave(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answer a request that ends; its blocks may be freed."""
        return False, self._scheduling.leave(request)

    # The workers' half.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Prepare for a step: what it computes may be wanted, so it is not left until `start_load_kv`."""
        super().bind_connector_metadata(connector_metadata)
        self._working.begin(self._orders())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step's requests are given."""
        self._working.load(self._orders().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all is loaded before the forward pass begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: what is compiled is caught before it is in the cache."""

    def wait_for_save(self) -> None:
        """Have the chunks written that this step completed."""
        self._working.end(self._orders().captures)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks that could not be loaded: their requests fail, others do not."""
        return self._working.take_broken_blocks()

    def build_connector_worker_meta(self) -> StepResults | None:
        """Tell the scheduler which chunks are written."""
        return self._working.take_results()

    # Both.

    def get_kv_connector_stats(self) -> SpliceStats | None:
        """Return what this half has counted."""
        half = self._scheduler if self._scheduler is not None else self._working
        return half.take_stats()

    def shutdown(self) -> None:
        """End the threads."""
        half = self._scheduler if self._scheduler is not None else self._working
        half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SpliceStats:
        """Return counts that came from another process."""
        return SpliceStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SpliceCounters:
        """Register the counters of ``/metrics``."""
        return SpliceCounters(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduling(self) -> SpliceScheduler:
        if self._scheduler is None:
            raise RuntimeError("a worker's connector was asked what only the scheduler's knows")
        return self._scheduler

    @property
    def _working(self) -> SpliceWorker:
        if self._worker is None:
            raise RuntimeError("the scheduler's connector was asked to do a worker's work")
        return self._worker

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        return orders if isinstance(orders, StepOrders) else StepOrders()
