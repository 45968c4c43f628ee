"""The four arms on an asynchronous backend: a beginning that is warmed once, and what goes on from it."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from typing import ClassVar, Protocol

from agentkv import AsyncAgentKVContext, Mode, SamplingOptions
from agentkv.backends.base import Request
from agentkv.tokens import TokenIds
from benchmarks._arms import ARMS, Case, StateConversation
from benchmarks.serving.record import Call, Recorder, calls_here, finished
from benchmarks.serving.workload import WARM_QUESTION, Job


class Talk(Protocol):
    """A conversation that goes on from a warmed beginning."""

    async def turn(self, job: Job, sampling: SamplingOptions) -> None:
        """Run one turn."""
        ...

    async def close(self) -> None:
        """Leave it."""
        ...


class Beginning(Protocol):
    """One turn of an arm, from which all its requests go on; no other arm shares its cache."""

    last: Call
    """The turn's call."""
    predicts: ClassVar[bool]
    """Whether the arm predicts cached tokens from its own history."""

    async def warm(self, job: Job) -> None:
        """Run the turn."""
        ...

    async def touch(self) -> None:
        """Have the server compute what it has evicted of the beginning."""
        ...

    async def talk(self) -> Talk:
        """Return a conversation that goes on from it."""
        ...

    async def close(self) -> None:
        """Leave it."""
        ...


async def _touch(backend: Recorder, ids: TokenIds, salt: str) -> None:
    # Without the last token: that has no KV after the turn itself either.
    request = Request(ids.prefix(len(ids) - 1), salt, salt, SamplingOptions(max_tokens=1))
    await finished(backend.astream(request))


class _ContextTalk:
    def __init__(self, context: AsyncAgentKVContext, stack: AsyncExitStack) -> None:
        self._context = context
        self._stack = stack

    async def turn(self, job: Job, sampling: SamplingOptions) -> None:
        for key, value in job.values.items():
            self._context.set(key, value)
        await self._context.ask(job.question, max_tokens=sampling.max_tokens, extra=sampling.extra)

    async def close(self) -> None:
        await self._stack.aclose()


class _ContextBeginning:
    """`agentkv` in mode on, and `rewrite` in mode off."""

    last: Call
    predicts: ClassVar[bool] = True

    def __init__(self, backend: Recorder, case: Case, mode: Mode, tenant: str) -> None:
        self._backend = backend
        self._context = AsyncAgentKVContext(
            backend, [*case.segments, *case.fields()], mode=mode, tenant=tenant, sampling=case.sampling
        )
        self._stack = AsyncExitStack()

    async def warm(self, job: Job) -> None:
        await self._stack.enter_async_context(self._context)
        calls = calls_here()
        for key, value in job.values.items():
            self._context.set(key, value)
        await self._context.ask(job.question)
        self.last = calls[-1]

    async def touch(self) -> None:
        await _touch(self._backend, self.last.sequence, self.last.salt)

    async def talk(self) -> Talk:
        stack = AsyncExitStack()
        context = await stack.enter_async_context(self._context.fork())
        return _ContextTalk(context, stack)

    async def close(self) -> None:
        await self._stack.aclose()


class _StateTalk:
    def __init__(self, backend: Recorder, tenant: str, conversation: StateConversation) -> None:
        self._backend = backend
        self._tenant = tenant
        self._conversation = conversation

    async def turn(self, job: Job, sampling: SamplingOptions) -> None:
        ids = self._conversation.prompt(job.values, job.question)
        request = Request(ids, conversation=self._tenant, salt=self._tenant, options=sampling)
        completion = await finished(self._backend.astream(request))
        self._conversation.record(ids, job.question, completion)

    async def close(self) -> None:
        self._backend.release(self._tenant)


class _StateBeginning:
    """`append_state`, and `hoist`, where the state of the warmed turn is stripped."""

    last: Call
    predicts: ClassVar[bool] = False

    def __init__(self, backend: Recorder, case: Case, tenant: str, *, strip: bool) -> None:
        self._backend = backend
        self._case = case
        self._tenant = tenant
        self._conversation = StateConversation(backend.tokenizer, case, strip=strip)

    async def warm(self, job: Job) -> None:
        calls = calls_here()
        talk = _StateTalk(self._backend, self._tenant, self._conversation)
        await talk.turn(job, self._case.sampling)
        self.last = calls[-1]

    async def touch(self) -> None:
        await _touch(self._backend, self._conversation.kept, self._tenant)

    async def talk(self) -> Talk:
        return _StateTalk(self._backend, self._tenant, self._conversation.fork())

    async def close(self) -> None:
        self._backend.release(self._tenant)


def beginning(name: str, backend: Recorder, case: Case, mode: Mode) -> Beginning:
    """Return an arm's beginning, apart from all others by its salt; `mode` is that of the arm agentkv."""
    tenant = f"{name}-{uuid.uuid4().hex}"  # vLLM takes no slash in a salt
    match name:
        case "rewrite":
            return _ContextBeginning(backend, case, Mode.OFF, tenant)
        case "agentkv":
            return _ContextBeginning(backend, case, mode, tenant)
        case "append_state":
            return _StateBeginning(backend, case, tenant, strip=False)
        case "hoist":
            return _StateBeginning(backend, case, tenant, strip=True)
    raise ValueError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")


def warm_job(case: Case) -> Job:
    """Return the turn that warms a beginning: the first values, and a question of its own."""
    return Job(dict(case.first_values), WARM_QUESTION)
