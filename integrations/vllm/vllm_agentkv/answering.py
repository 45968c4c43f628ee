"""Reading what a request asks, and answering what needs no computing."""

from __future__ import annotations

from typing import Any

from agentkv.errors import CapabilityError
from agentkv.kv import ModelIdentity, Refusal
from agentkv.kv.protocol import Ask, Asked, Compile, Hello, HelloAnswer, Refused, Splices, read_asking
from vllm_agentkv.calls import Calls
from vllm_agentkv.jobs import Answer, TalkJob
from vllm_agentkv.options import SpliceOptions, Switch
from vllm_agentkv.shelf import Shelf


class Answering:
    """What the server says about itself, its artifacts and the calls it has seen."""

    def __init__(
        self,
        shelf: Shelf,
        identity: ModelIdentity,
        options: SpliceOptions,
        calls: Calls,
        block_size: int,
    ) -> None:
        self._shelf = shelf
        self._calls = calls
        self._hello = HelloAnswer(
            identity=identity,
            block_size=block_size,
            compiles=options.compile is Switch.ON,
            tickets=options.ticket_key is not None,
        )

    def read(self, value: Any) -> Splices | Compile | TalkJob:
        """Read what a request carries; what is not understood is answered so, and computed normally."""
        try:
            asking = read_asking(value)
        except CapabilityError as error:
            return TalkJob(Refused(reason=Refusal.PROTOCOL, message=str(error)))
        if isinstance(asking, Hello):
            return TalkJob(self._hello)
        if isinstance(asking, Ask):
            return TalkJob(call=asking.call, have=asking.have)
        return asking

    def outcomes(self, call: str) -> Asked:
        """Say what became of a call's prompts so far."""
        return Asked(outcomes=self._calls.outcomes(call))

    def end(self, job: TalkJob) -> Answer:
        """Answer a request that is at its end."""
        if job.answer is not None:
            return job.answer
        return Asked(
            outcomes=self._calls.outcomes(job.call) if job.call is not None else (),
            # One that is being verified counts as sound: it will hardly turn out damaged.
            have=tuple(not isinstance(self._shelf.look(name), Refusal) for name in job.have),
        )
