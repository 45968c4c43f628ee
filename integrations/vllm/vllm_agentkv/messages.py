"""What the two halves of the connector tell each other in each step of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_agentkv.work import Capture, Failed, Load, Written


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):
    """From the scheduler to the workers."""

    loads: tuple[Load, ...] = ()
    captures: tuple[Capture, ...] = ()
    dropped: tuple[str, ...] = ()
    """Requests that ended: what was captured of them is let go."""


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: compiling requests that are done."""

    compiled: dict[str, Written | Failed] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the words of two workers."""
        if not isinstance(other, StepResults):
            raise TypeError(f"a worker answered with {type(other).__name__}; all must run this connector")
        return StepResults(self.compiled | other.compiled)
