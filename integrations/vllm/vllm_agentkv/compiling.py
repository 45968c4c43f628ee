"""The scheduler's side of compiling: permission, quota, and a request that lives until its file is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agentkv.kv import ArtifactStore, ModelIdentity, Refusal, artifact_name
from agentkv.kv.protocol import Compile, Compiled, Refused
from vllm_agentkv.choosing import slots_of
from vllm_agentkv.jobs import CompileJob, TalkJob
from vllm_agentkv.metrics import COMPILES, SpliceStats
from vllm_agentkv.permission import refusal_of_compile
from vllm_agentkv.quota import Quota
from vllm_agentkv.shelf import Shelf
from vllm_agentkv.work import Capture, Chunk, Failed, Written

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_agentkv.options import SpliceOptions

_LONGEST_WAIT: Final = 4096
"""Most tokens that are generated while a file is written."""
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class Compiling:
    """What happens to `Compile` requests.

    An artifact is written beside the engine's loop. The request goes on generating until that is done, for
    the answer has to be in its response; no other request waits.
    """

    def __init__(
        self,
        store: ArtifactStore,
        identity: ModelIdentity,
        options: SpliceOptions,
        shelf: Shelf,
        ticket_key: bytes | None,
        stats: SpliceStats,
    ) -> None:
        self._store = store
        self._identity = identity
        self._options = options
        self._shelf = shelf
        self._ticket_key = ticket_key
        self._stats = stats
        self._quota = Quota(store, options.compile_quota_bytes)

    def begin(self, request: Request, asking: Compile) -> CompileJob | TalkJob:
        """Take a request on, or say at once why not; an artifact that exists is not compiled again."""
        refused = refusal_of_compile(request, asking, self._options, self._ticket_key)
        if refused is not None:
            return self._refuse(request, refused)
        prompt = tuple(request.prompt_token_ids or ())
        chunk = Chunk(asking.tenant, prompt[: asking.anchor], prompt[asking.anchor :])
        name = artifact_name(
            tenant=chunk.tenant, fingerprint=self._identity.fingerprint, anchor=chunk.anchor, ids=chunk.ids
        )
        job = CompileJob(request, chunk, name)
        if not isinstance(self._shelf.look(name), Refusal):
            self._settle(job, Compiled(artifact=name, tokens=len(chunk.ids), nbytes=self._store.nbytes(name)))
            self._stats.count(COMPILES, "existing")
            return job
        size = self._size(len(chunk.ids))
        lacking = self._quota.reserve(request.request_id, chunk.tenant, size)
        if lacking is not None:
            message = (
                f"the artifact would take {size} bytes, {lacking} more than tenant {chunk.tenant!r} has left "
                f"of {self._options.compile_quota_bytes}; delete artifacts, or raise compile_quota_bytes"
            )
            return self._refuse(request, Refused(reason=Refusal.DISABLED, message=message))
        _keep_alive(request)
        return job

    def captures(
        self, jobs: Sequence[CompileJob], output: SchedulerOutput, block_size: int
    ) -> Iterator[Capture]:
        """Say which rows of which chunks a step computes."""
        for job in jobs:
            scheduled = output.num_scheduled_tokens.get(job.request.request_id, 0)
            anchor, length = len(job.chunk.anchor), job.request.num_prompt_tokens
            computed = job.request.num_computed_tokens
            if job.answer is not None or not scheduled or computed >= length:
                continue
            state = output.kv_connector_block_state
            blocks = state.get_block_ids(job.request.request_id) if state is not None else None
            if blocks is None:
                continue
            first, stop = max(computed, anchor), min(computed + scheduled, length)
            yield Capture(
                request=job.request.request_id,
                chunk=job.chunk,
                first=first - anchor,
                slots=tuple(slots_of(blocks[0], first, stop, block_size)),
                last=stop == length,
            )

    def done(self, job: CompileJob, result: Written | Failed) -> None:
        """Note what the worker says of a request, and let it end."""
        if isinstance(result, Written):
            answer: Compiled | Refused = Compiled(
                artifact=result.artifact, tokens=len(job.chunk.ids), nbytes=result.nbytes
            )
            self._stats.count(COMPILES, "written")
        else:
            answer = Refused(reason=Refusal.LOAD, message=result.message)
            self._stats.count(COMPILES, "failed")
        self._quota.release(job.request.request_id)
        self._settle(job, answer)

    def orphaned(self, request_id: str) -> None:
        """Note that the artifact of a request that ended before it was there has been written, or not."""
        self._quota.release(request_id)

    def end(self, job: CompileJob) -> Compiled | Refused:
        """Return the answer of a request that ended."""
        if job.answer is not None:
            return job.answer
        self._quota.release(job.request.request_id)
        self._stats.count(COMPILES, "unfinished")
        return Refused(
            reason=Refusal.LOAD,
            message="the request ended before the artifact was written; ask later whether the server has it",
        )

    def _size(self, tokens: int) -> int:
        one = self._identity
        return tokens * one.layers * one.kv_heads * (one.key_dim + one.value_dim) * _BYTES[one.dtype]

    def _refuse(self, request: Request, refused: Refused) -> TalkJob:
        self._stats.count(COMPILES, "refused")
        request.max_tokens = 1
        return TalkJob(refused)

    def _settle(self, job: CompileJob, answer: Compiled | Refused) -> None:
        job.answer = answer
        # One token more, and the request ends with the answer.
        job.request.max_tokens = 1


def _keep_alive(request: Request) -> None:
    """Have a request compute its whole prompt, and go on until it is told to end."""
    # A hit of the prefix cache would not be computed, so not be caught.
    request.skip_reading_prefix_cache = True
    request.max_tokens = _LONGEST_WAIT
    if request.sampling_params is not None:
        sampling = request.sampling_params.clone()
        sampling.ignore_eos = True
        sampling.stop_token_ids = []
        sampling._eos_token_id = None
        sampling.repetition_detection = None
        request.sampling_params = sampling
