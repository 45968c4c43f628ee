"""The scheduler's half of the connector: what is loaded, what is compiled, and what is answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from agentkv.errors import AgentKVError
from agentkv.kv import ArtifactStore, ModelIdentity, Refusal
from agentkv.kv.protocol import Refused, Splices, SpliceSpec
from vllm_agentkv.answering import Answering
from vllm_agentkv.calls import Calls
from vllm_agentkv.choosing import beyond, ends_at, run_from
from vllm_agentkv.compiling import Compiling
from vllm_agentkv.jobs import Answer, CompileJob, Job, SpliceJob, TalkJob
from vllm_agentkv.messages import StepOrders, StepResults
from vllm_agentkv.metrics import SpliceStats
from vllm_agentkv.permission import refusal_of_request, refusal_of_splice
from vllm_agentkv.shelf import Shelf
from vllm_agentkv.work import Load, Source

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_agentkv.options import SpliceOptions

logger = logging.getLogger("vllm.agentkv")
_VERIFY_S: Final = 60.0
"""Longest that a request waits until its artifacts are verified; then it is computed."""


class SpliceScheduler:
    """Decides for each request which spans are loaded.

    Everything is checked before a request is scheduled, so that whatever is wrong with an artifact costs
    nothing but the computing of its tokens.
    """

    def __init__(
        self, store: ArtifactStore, identity: ModelIdentity, options: SpliceOptions, *, block_size: int
    ) -> None:
        self._identity = identity
        self._options = options
        self._block_size = block_size
        self._ticket_key = options.ticket_key.read() if options.ticket_key else None
        self._shelf = Shelf(store)
        self._calls = Calls()
        self._stats = SpliceStats()
        self._compiling = Compiling(store, identity, options, self._shelf, self._ticket_key, self._stats)
        self._answering = Answering(self._shelf, identity, options, self._calls, block_size)
        self._jobs: dict[str, Job] = {}
        self._loads: list[Load] = []
        self._dropped: list[str] = []

    def arrive(self, request: Request) -> None:
        """Note a new request; one that carries no word for this connector is none of its business."""
        params = request.kv_transfer_params or {}
        if "agentkv" not in params:
            return
        try:
            job = self._job(request, params["agentkv"])
        except (AgentKVError, OSError) as error:
            # An exception would end the engine, and a request is never worth that.
            logger.exception("request %s is computed without splices", request.request_id)
            job = TalkJob(Refused(reason=Refusal.LOAD, message=str(error)))
        self._jobs[request.request_id] = job

    def loadable(self, request: Request, computed: int) -> int | None:
        """Return how many tokens behind `computed` cached ones will be loaded; None: ask again.

        It may be asked any number of times for a request that waits.
        """
        job = self._jobs.get(request.request_id)
        if not isinstance(job, SpliceJob):
            return 0
        if not self._settle(job) or (job.is_prime and self._calls.get(job.asking.call).gathers()):
            return None
        usable = self._usable(job)
        run = run_from(usable, computed, request.num_tokens - 1)
        end = ends_at(run, computed)
        if beyond(usable, end) and self._calls.get(job.asking.call).awaits(job.asking.primes, job.length):
            return None
        job.local = computed
        return end - computed

    def admit(self, request: Request, blocks: Sequence[int], loaded: int) -> None:
        """Note that a request got its blocks and is computed from here on.

        Parameters
        ----------
        blocks
            Its blocks, from its first token on.
        loaded
            Tokens behind its cached ones that the worker is to load.
        """
        job = self._jobs.get(request.request_id)
        if not isinstance(job, SpliceJob):
            return
        usable = self._usable(job)
        if loaded:
            run = run_from(usable, job.local, job.local + loaded)
            needed = -(-(job.local + loaded) // self._block_size)
            self._loads.append(
                Load(
                    request=request.request_id,
                    pieces=run,
                    sources=tuple(self._source(job, piece.artifact) for piece in run),
                    blocks=tuple(blocks[:needed]),
                )
            )
        if job.admitted:
            return  # resumed after preemption: counted already
        job.admitted, job.loaded = True, loaded
        there = job.local + loaded
        for splice in usable:
            # The prompt's last token is computed in any case.
            if min(splice.stop, request.num_tokens - 1) > there:
                job.refused[splice] = Refusal.PRIME
        self._count(job)

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Say what the workers do in a step that was scheduled."""
        for request_id, scheduled in output.num_scheduled_tokens.items():
            job = self._jobs.get(request_id)
            if (
                isinstance(job, SpliceJob)
                and job.is_prime
                and job.request.num_computed_tokens + scheduled >= job.length
            ):
                self._calls.get(job.asking.call).done.add(job.length)
        made = StepOrders(
            loads=tuple(self._loads),
            captures=tuple(
                self._compiling.captures(
                    [job for job in self._jobs.values() if isinstance(job, CompileJob)],
                    output,
                    self._block_size,
                )
            ),
            dropped=tuple(self._dropped),
        )
        self._loads, self._dropped = [], []
        return made

    def hear(self, results: StepResults) -> None:
        """Note what the workers have compiled."""
        for request_id, result in results.compiled.items():
            job = self._jobs.get(request_id)
            if isinstance(job, CompileJob):
                self._compiling.done(job, result)
            else:
                self._compiling.orphaned(request_id)

    def leave(self, request: Request) -> dict[str, Any] | None:
        """Forget a request that ended; return what its response carries."""
        job = self._jobs.pop(request.request_id, None)
        if job is None:
            return None
        answer: Answer
        if isinstance(job, CompileJob):
            self._dropped.append(request.request_id)
            answer = self._compiling.end(job)
        elif isinstance(job, SpliceJob):
            if not job.admitted:
                self._count(job)
            call = self._calls.get(job.asking.call)
            call.done.add(job.length)
            call.close(job.outcome())
            answer = self._answering.outcomes(job.asking.call)
        else:
            answer = self._answering.end(job)
        return {"agentkv": answer.model_dump(mode="json")}

    def take_stats(self) -> SpliceStats | None:
        """Return what was counted since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """End the thread that verifies."""
        self._shelf.close()

    def _job(self, request: Request, word: object) -> Job:
        asking = self._answering.read(word)
        if isinstance(asking, Splices):
            return self._splice_job(request, asking)
        if isinstance(asking, TalkJob):
            if isinstance(asking.answer, Refused):
                self._stats.refuse(asking.answer.reason)
            return asking
        return self._compiling.begin(request, asking)

    def _splice_job(self, request: Request, asking: Splices) -> SpliceJob:
        length = request.num_prompt_tokens
        is_prime = length in asking.primes
        wanted = tuple(one for one in asking.splices if not is_prime or one.stop <= length)
        job = SpliceJob(request, asking, wanted)
        if is_prime:
            # A call's prompts share their sampling parameters; all that a prime is for is its prefix.
            request.max_tokens = 1
            self._calls.get(asking.call).arrived.add(length)
        else:
            self._calls.get(asking.call).main = True
        reason = refusal_of_request(request, asking, self._options, self._ticket_key)
        if reason is not None:
            job.refused = dict.fromkeys(wanted, reason)
        self._settle(job)
        return job

    def _settle(self, job: SpliceJob) -> bool:
        """Check what is not checked yet; return whether all is known."""
        late = time.monotonic() - job.arrived > _VERIFY_S
        for splice in job.open:
            known = self._shelf.look(splice.artifact)
            if known is None and late:
                known = Refusal.LOAD
            if known is None:
                continue
            if isinstance(known, Refusal):
                job.refused[splice] = known
                continue
            prompt = job.request.prompt_token_ids or []
            reason = refusal_of_splice(splice, known, job.asking.tenant, prompt, self._identity)
            if reason is None:
                job.usable[splice] = known
            else:
                job.refused[splice] = reason
        return not job.open

    def _usable(self, job: SpliceJob) -> list[SpliceSpec]:
        return sorted(job.usable, key=lambda splice: splice.start)

    def _source(self, job: SpliceJob, artifact: str) -> Source:
        sound = next(known for splice, known in job.usable.items() if splice.artifact == artifact)
        return Source(job.asking.tenant, sound.header.ids, sound.stamp)

    def _count(self, job: SpliceJob) -> None:
        if not job.is_prime:
            for reason in job.refused.values():
                self._stats.refuse(reason)
