"""How requests come: one at a time, by a Poisson process, from clients in a closed loop, in conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from agentkv import SamplingOptions
from agentkv.errors import AgentKVError
from benchmarks.serving.arms import Beginning, Talk
from benchmarks.serving.record import Call, calls_here
from benchmarks.serving.workload import Job

Tick = Callable[[], None]
"""Called after each request."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One request of a series, as it went; times by `time.perf_counter`."""

    number: int
    """Its place in the series, or its turn in a conversation, from 1 on."""
    scheduled: float
    """When it arrived, whether the client had time for it or not."""
    ended: float
    call: Call | None
    """None if it failed before it was sent."""
    before: Call
    """What it goes on from."""
    error: str | None = None
    agent: int | None = None


async def _turn(
    talk: Talk,
    job: Job,
    sampling: SamplingOptions,
    before: Call,
    number: int,
    scheduled: float,
    agent: int | None = None,
) -> Taken:
    calls = calls_here()
    error = None
    try:
        await talk.turn(job, sampling)
    except AgentKVError as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Taken(number, scheduled, perf_counter(), calls[-1] if calls else None, before, error, agent)


async def single(
    beginning: Beginning, job: Job, sampling: SamplingOptions, number: int, scheduled: float
) -> Taken:
    """Run one request that goes on from a warmed beginning."""
    talk = await beginning.talk()
    try:
        return await _turn(talk, job, sampling, beginning.last, number, scheduled)
    finally:
        await talk.close()


async def in_turn(
    beginning: Beginning, jobs: Sequence[Job], sampling: SamplingOptions, tick: Tick
) -> list[Taken]:
    """Run one request at a time."""
    taken = []
    for number, job in enumerate(jobs, start=1):
        taken.append(await single(beginning, job, sampling, number, perf_counter()))
        tick()
    return taken


async def at_times(
    beginning: Beginning, jobs: Sequence[Job], times: Sequence[float], sampling: SamplingOptions, tick: Tick
) -> list[Taken]:
    """Run each request when it arrives, in seconds from now, whether those before are answered or not."""
    start = perf_counter()

    async def one(number: int, job: Job, at: float) -> Taken:
        await asyncio.sleep(max(0.0, start + at - perf_counter()))
        taken = await single(beginning, job, sampling, number, start + at)
        tick()
        return taken

    pairs = enumerate(zip(jobs, times, strict=True), start=1)
    return await asyncio.gather(*(one(number, job, at) for number, (job, at) in pairs))


async def closed_loop(
    beginning: Beginning, jobs: Sequence[Job], clients: int, sampling: SamplingOptions, tick: Tick
) -> list[Taken]:
    """Run requests from clients of which each sends the next one when its last one is answered."""
    waiting = iter(list(enumerate(jobs, start=1)))
    taken: list[Taken] = []

    async def client() -> None:
        for number, job in waiting:
            taken.append(await single(beginning, job, sampling, number, perf_counter()))
            tick()

    await asyncio.gather(*(client() for _ in range(clients)))
    return sorted(taken, key=lambda one: one.number)


async def conversations(
    beginning: Beginning, agents: Sequence[Sequence[Job]], sampling: SamplingOptions, tick: Tick
) -> list[Taken]:
    """Run the conversations of all agents at once; each asks again as soon as it is answered."""

    async def agent(index: int, jobs: Sequence[Job]) -> list[Taken]:
        talk = await beginning.talk()
        before, taken = beginning.last, []
        try:
            for number, job in enumerate(jobs, start=1):
                one = await _turn(talk, job, sampling, before, number, perf_counter(), index)
                taken.append(one)
                before = one.call if one.call is not None and one.error is None else before
                tick()
        finally:
            await talk.close()
        return taken

    found = await asyncio.gather(*(agent(index, jobs) for index, jobs in enumerate(agents)))
    return [one for taken in found for one in taken]
