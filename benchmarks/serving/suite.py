"""Runs a plan: every arm alike, one after the other, and each series from freshly touched beginnings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.progress import Progress

from agentkv import Mode, SamplingOptions
from benchmarks._arms import AGENTKV, REWRITE
from benchmarks.serving.arms import Beginning, beginning, warm_job
from benchmarks.serving.counters import Counters
from benchmarks.serving.load import Taken, Tick, at_times, closed_loop, conversations, in_turn
from benchmarks.serving.measure import (
    make_rows,
    percentile,
    ratio,
    residues,
    summary,
    talk_summary,
)
from benchmarks.serving.plan import AGENTS, CLIENTS, SATURATED_TOKENS, SizePlan
from benchmarks.serving.record import Recorder
from benchmarks.serving.workload import Jobs, agent_jobs, arrivals, case_of

ReadCounters = Callable[[], Awaitable[Counters]]
_Series = Callable[[Beginning, Tick], Awaitable[list[Taken]]]


@dataclass(frozen=True, slots=True)
class _Sum:
    rows: list[dict[str, Any]]
    counted: Counters


class Suite:
    """Measures one prompt size.

    Parameters
    ----------
    read_counters
        Reads the server's counters.
    mode
        Of the arm agentkv.
    """

    def __init__(
        self,
        backend: Recorder,
        plan: SizePlan,
        read_counters: ReadCounters,
        progress: Progress,
        mode: Mode,
        seed: int,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._read = read_counters
        self._progress = progress
        self._mode = mode
        self._seed = seed
        self._block = backend.capabilities.block_size
        self._case = case_of(backend.tokenizer, plan.asked_tokens, plan.output_tokens)
        self._jobs = Jobs(backend.tokenizer, self._block, seed)
        self._used = 0
        self._arms: dict[str, Beginning] = {}
        self._seconds: dict[str, float] = {}

    async def run(self) -> dict[str, Any]:
        """Measure all series; returns the result of this size, its raw rows included."""
        plan = self._plan
        await self._warm()
        try:
            unloaded = await self._unloaded()
            seconds = percentile([row["duration_s"] for row in unloaded["arms"][REWRITE]["rows"]], 0.5)
            loads = [await self._load(load.utilisation, load.requests, seconds) for load in plan.loads]
            result: dict[str, Any] = {
                "asked_tokens": plan.asked_tokens,
                "block_size": self._block,
                "output_tokens": plan.output_tokens,
                "unloaded": unloaded,
                "loads": loads,
            }
            if plan.saturated is not None:
                result["saturated"] = await self._saturated()
            if plan.talking:
                result["conversations"] = await self._conversations()
        finally:
            for arm in self._arms.values():
                await arm.close()
        result["residues"] = residues(self._own_rows(result), self._block)
        result["residues_covered"] = len(result["residues"]) == self._block
        result["seconds"] = self._seconds
        return result

    async def _warm(self) -> None:
        start = perf_counter()
        task = self._progress.add_task(self._title("warming"), total=len(self._plan.arms))
        for name in self._plan.arms:
            self._progress.update(task, description=self._title("warming", name))
            self._arms[name] = beginning(name, self._backend, self._case, self._mode)
            await self._arms[name].warm(warm_job(self._case))
            self._progress.advance(task)
        self._progress.remove_task(task)
        self._seconds["warming"] = perf_counter() - start

    async def _unloaded(self) -> dict[str, Any]:
        sampling = SamplingOptions(max_tokens=self._plan.output_tokens)
        jobs = self._take(self._plan.unloaded.kept)
        arms: dict[str, Any] = {}
        for name in self._plan.arms:
            count = self._plan.unloaded.of(name, self._mode)

            async def series(arm: Beginning, tick: Tick, count: int = count) -> list[Taken]:
                return await in_turn(arm, jobs[:count], sampling, tick)

            done = await self._series("one at a time", name, count, series)
            arms[name] = summary(done.rows, done.counted)
        return {
            "ttft_rewrite_over_agentkv": ratio(arms[REWRITE]["rows"], arms[AGENTKV]["rows"], 0.5),
            "arms": arms,
        }

    async def _load(self, utilisation: float, requests: int, service_s: float) -> dict[str, Any]:
        sampling = SamplingOptions(max_tokens=self._plan.output_tokens)
        rate = float(f"{utilisation / service_s:.3g}")
        times = arrivals(rate, requests, self._seed)
        jobs = self._take(requests)

        async def series(arm: Beginning, tick: Tick) -> list[Taken]:
            return await at_times(arm, jobs, times, sampling, tick)

        arms: dict[str, Any] = {}
        for name in self._plan.arms:
            done = await self._series(f"{rate:g} a second", name, requests, series)
            arms[name] = summary(done.rows, done.counted)
        return {
            "rate": rate,
            "rewrite_utilisation": utilisation,
            "rewrite_service_s": service_s,
            "requests": requests,
            "arrivals_s": times,
            "arms": arms,
            "ttft_p90_rewrite_over_agentkv": ratio(arms[REWRITE]["rows"], arms[AGENTKV]["rows"], 0.9),
        }

    async def _saturated(self) -> dict[str, Any]:
        counts = self._plan.saturated
        if counts is None:
            raise ValueError("the plan holds no saturated series")
        # Every arm makes as many tokens: an early end would look like speed.
        sampling = SamplingOptions(max_tokens=SATURATED_TOKENS, extra={"ignore_eos": True})
        jobs = self._take(counts.kept)
        arms: dict[str, Any] = {}
        for name in self._plan.arms:
            count = counts.of(name, self._mode)

            async def series(arm: Beginning, tick: Tick, count: int = count) -> list[Taken]:
                return await closed_loop(arm, jobs[:count], CLIENTS, sampling, tick)

            done = await self._series(f"{CLIENTS} clients", name, count, series)
            found = summary(done.rows, done.counted)
            output = found["throughput"] * SATURATED_TOKENS
            arms[name] = {**found, "requests": count, "output_tokens_per_s": output}
        return {
            "clients": CLIENTS,
            "output_tokens": SATURATED_TOKENS,
            "throughput": {name: arm["throughput"] for name, arm in arms.items()},
            "arms": arms,
        }

    async def _conversations(self) -> dict[str, Any]:
        sampling = SamplingOptions(max_tokens=self._plan.talk_tokens)
        agents = agent_jobs(AGENTS, self._plan.turns.kept, self._seed)
        arms: dict[str, Any] = {}
        for name in self._plan.talking:
            turns = self._plan.turns.of(name, self._mode)

            async def series(arm: Beginning, tick: Tick, turns: int = turns) -> list[Taken]:
                return await conversations(arm, [jobs[:turns] for jobs in agents], sampling, tick)

            done = await self._series(f"{AGENTS} agents", name, AGENTS * turns, series)
            arms[name] = talk_summary(done.rows, done.counted)
        return {
            "agents": AGENTS,
            "output_tokens": self._plan.talk_tokens,
            "left_out": [name for name in self._plan.arms if name not in self._plan.talking],
            "arms": arms,
        }

    async def _series(self, what: str, name: str, count: int, series: _Series) -> _Sum:
        begun = perf_counter()
        arm = self._arms[name]
        task = self._progress.add_task(self._title(what, name), total=count)
        await arm.touch()
        before = await self._read()
        start = perf_counter()
        taken = await series(arm, lambda: self._progress.advance(task))
        counted = await self._read() - before
        self._progress.remove_task(task)
        rows = make_rows(taken, self._backend.calls, start, self._block, predicts=arm.predicts)
        self._seconds[f"{what}: {name}"] = seconds = perf_counter() - begun
        self._progress.console.print(f"{self._title(what, name)}: {seconds:.0f} s", highlight=False)
        return _Sum(rows, counted)

    def _take(self, count: int) -> list[Any]:
        jobs = self._jobs.take(self._used, count)
        self._used += count
        return jobs

    def _title(self, what: str, name: str = "") -> str:
        return f"{self._plan.asked_tokens:,} tokens, {what}" + (f": {name}" if name else "")

    @staticmethod
    def _own_rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = [
            result["unloaded"],
            *result["loads"],
            *(result[part] for part in ("saturated", "conversations") if part in result),
        ]
        return [row for part in found for row in part["arms"].get(AGENTKV, {"rows": []})["rows"]]
