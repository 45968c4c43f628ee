"""One call in flight: the backend's events on their way to a recorded turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from agentkv.backends.base import Completion, Delta, Event, FinishReason, SamplingOptions, Usage
from agentkv.conversation import Conversation
from agentkv.errors import BackendError, ContextBusyError, ContextError
from agentkv.inputs import Input
from agentkv.options import sampling_of
from agentkv.planned import PlannedTurn
from agentkv.prompt import Prompt
from agentkv.reply import Reply
from agentkv.tracing import TurnSpan

_Made = TypeVar("_Made")


class Steps:
    """Who takes the next step of a stream, and whether it is over; for any threads and tasks.

    Whoever is told so, once, ends the call: stops the backend, drops the turn and frees the context.
    """

    def __init__(self) -> None:
        # A signal handler may close the stream amid a step's beginning, in the same thread.
        self._lock = threading.RLock()
        self._taken = False
        self._over = False

    @property
    def over(self) -> bool:
        """Whether the answer is whole, or was stopped or failed."""
        return self._over

    def begin(self) -> bool:
        """Begin a step; False once the stream is over.

        Raises
        ------
        ContextBusyError
            Another thread or task is amid a step.
        """
        with self._lock:
            if self._over:
                return False
            if self._taken:
                raise ContextBusyError(
                    "another thread or task is waiting for this stream's next delta: iterate and keep it in "
                    "one place; only closing it is possible from elsewhere"
                )
            self._taken = True
            return True

    def end(self, *, more: bool) -> bool:
        """End a step; True if the stream is over and the caller has to end the call.

        Parameters
        ----------
        more
            Whether another step can follow.
        """
        with self._lock:
            self._taken = False
            self._over = self._over or not more
            return self._over

    def stop(self) -> bool:
        """Let no further step begin; True if none is running, so that the caller has to end the call."""
        with self._lock:
            first, self._over = not self._over, True
            return first and not self._taken

    def unless_over(self, action: Callable[[], _Made]) -> _Made:
        """Do something that must not happen once the stream is over.

        Raises
        ------
        ContextError
            It is over.
        """
        with self._lock:
            if self._over:
                raise ContextError("the stream was closed while it answered; nothing was recorded")
            return action()


class Exchange:
    """One call in flight: takes the backend's events, and commits or drops the turn."""

    def __init__(
        self, conversation: Conversation, planned: PlannedTurn, sampling: SamplingOptions, steps: Steps
    ) -> None:
        self._conversation = conversation
        self._planned = planned
        self._steps = steps
        self.request: Final = conversation.request(planned.turn, sampling)
        self._span = TurnSpan(conversation.backend.capabilities.name, conversation.options.conversation)
        self._start = time.perf_counter()
        self._first: float | None = None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._whole = 0
        self.reply: Reply | None = None

    @classmethod
    def plan(
        cls,
        conversation: Conversation,
        prompt: Prompt,
        inputs: Iterable[Input],
        sampling: Mapping[str, Any],
        steps: Steps,
    ) -> Exchange:
        """Plan a turn; nothing is changed until it is committed.

        Parameters
        ----------
        prompt
            What `Conversation.read` gave.
        sampling
            Sampling options to change for this call.
        steps
            Of the stream: once it is over nothing is committed.
        """
        options = sampling_of(conversation.options.sampling, sampling)
        return cls(conversation, conversation.plan_turn(prompt, inputs, options), options, steps)

    def feed(self, event: Event) -> Delta | None:
        """Take one event; returns the delta to hand on, if it is one with text.

        Raises
        ------
        ContextError
            The stream was closed, or the context left; nothing is recorded.
        """
        self._conversation.check_open(self._planned)
        if isinstance(event, Completion):
            self._commit(event, stopped=False)
            return None
        if self._first is None:
            self._first = time.perf_counter()
        self._ids.extend(event.ids)
        if not event.text and not event.reasoning:
            return self._steps.unless_over(lambda: None)
        self._text.append(event.text)
        self._whole = len(self._ids)
        return self._steps.unless_over(lambda: event)

    def ended(self) -> Reply:
        """Return the reply once the backend's events have ended.

        Raises
        ------
        BackendError
            They ended without a completion.
        """
        if self.reply is None:
            name = self._conversation.backend.capabilities.name
            raise BackendError(
                f"backend {name!r} ended a call without a completion, or its stream was closed; "
                "nothing was recorded"
            )
        return self.reply

    def keep(self) -> Reply:
        """Record what has come so far as the whole answer, up to the last complete character."""
        now = time.perf_counter()
        prompt_tokens = len(self._planned.turn.ids)
        cached = self._planned.turn.predicted_cached_tokens
        ids = tuple(self._ids[: self._whole])
        text = "".join(self._text)
        completion = Completion(
            text=text,
            ids=ids if ids or not text else None,
            finish_reason=FinishReason.STOPPED,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached,
                computed_tokens=prompt_tokens - cached,
                generated_tokens=len(ids),
            ),
            ttft_s=(self._first or now) - self._start,
            duration_s=now - self._start,
        )
        return self._commit(completion, stopped=True)

    def drop(self) -> None:
        """End a call whose turn is not recorded; one that is recorded stays so."""
        self._span.drop("stopped or failed")

    def _commit(self, completion: Completion, *, stopped: bool) -> Reply:
        def record() -> Reply:
            self.reply = self._conversation.commit(self._planned, completion, stopped=stopped)
            return self.reply

        reply = self._steps.unless_over(record)
        self._span.finish(reply.report)
        return reply
