"""Counters in vLLM's own ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from agentkv.kv import Refusal

SPLICES: Final = "agentkv_splices_loaded"
TOKENS: Final = "agentkv_tokens_loaded"
REFUSALS: Final = "agentkv_refusals"
COMPILES: Final = "agentkv_compiles"
READS: Final = "agentkv_artifact_reads"
LOAD_FAILURES: Final = "agentkv_load_failures"

COUNTERS: Final = {
    SPLICES: ("Pieces of artifacts that were loaded instead of prefilled.", None),
    TOKENS: ("Prompt tokens that were loaded instead of prefilled.", None),
    REFUSALS: ("Splices of main prompts that were computed instead, by reason.", "reason"),
    COMPILES: ("Requests to compile a chunk, by what came of them.", "result"),
    READS: ("Artifacts taken from the worker's memory or read from disk.", "tier"),
    LOAD_FAILURES: ("Requests failed because an artifact could not be read after it was verified.", None),
}
"""Name without prefix: what it counts, and its label."""


_VALUES: Final = {
    "reason": tuple(reason.name.lower() for reason in Refusal),
    "result": ("written", "existing", "refused", "failed", "unfinished"),
    "tier": ("ram", "disk"),
}


@dataclass
class SpliceStats(KVConnectorStats):
    """Counts of one interval: counter, label value, count. It is plain data: it crosses processes."""

    def count(self, counter: str, label: str = "", by: int = 1) -> None:
        """Add to a counter of `COUNTERS`."""
        counts = self.data.setdefault(counter, {})
        counts[label] = counts.get(label, 0) + by

    def refuse(self, reason: Refusal) -> None:
        """Count a splice that is computed instead."""
        self.count(REFUSALS, reason.name.lower())

    def take(self) -> SpliceStats | None:
        """Return what was counted and begin anew; None if nothing was."""
        if self.is_empty():
            return None
        taken = SpliceStats(data=self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up two intervals or processes."""
        total = SpliceStats()
        for stats in (self, other):
            for counter, counts in stats.data.items():
                for label, by in counts.items():
                    total.count(counter, label, by)
        return total

    def reduce(self) -> dict[str, int | float]:
        """Flatten for vLLM's log."""
        return {
            f"{counter}{'/' if label else ''}{label}": by
            for counter, counts in self.data.items()
            for label, by in counts.items()
        }

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class SpliceCounters(KVConnectorPromMetrics):
    """The counters, registered in the process that answers ``/metrics``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:{name}",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (text, label) in COUNTERS.items()
        }
        for engine in per_engine_labelvalues.values():
            # Shown from the start: a counter that appears with its first count has no rate before it.
            for name, (_, label) in COUNTERS.items():
                for value in _VALUES.get(label, ()) if label else [None]:
                    self._counters[name].labels(*engine, *([] if value is None else [value]))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, counts in transfer_stats_data.items():
            for label, by in counts.items():
                values = [*engine, label] if COUNTERS[name][1] else engine
                self._counters[name].labels(*values).inc(by)
