"""One call in flight: the backend's events on their way to a recorded turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentkv.backends.base import Completion, Delta, Event, FinishReason, SamplingOptions, Usage
from agentkv.conversation import Conversation, sampling_of
from agentkv.errors import BackendError, ContextClosedError
from agentkv.inputs import Input
from agentkv.reply import Reply
from agentkv.tracing import TurnSpan
from agentkv.turn import PendingTurn


class Exchange:
    """One call in flight: takes the backend's events, and commits or drops the turn."""

    def __init__(
        self,
        conversation: Conversation,
        pending: PendingTurn,
        shadow: PendingTurn | None,
        sampling: SamplingOptions,
    ) -> None:
        self._conversation = conversation
        self._pending = pending
        self._shadow = shadow
        self.request: Final = conversation.request(pending, sampling)
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
        inputs: Iterable[Input],
        sampling: Mapping[str, Any],
        pulled: Mapping[str, object] | None = None,
    ) -> Exchange:
        """Plan a turn; nothing is changed until it is committed.

        Parameters
        ----------
        sampling
            Sampling options to change for this call.
        pulled
            Values of fields that were awaited.
        """
        options = sampling_of(conversation.options.sampling, sampling)
        return cls(conversation, *conversation.plan_turn(inputs, options, pulled), options)

    def feed(self, event: Event) -> Delta | None:
        """Take one event; returns the delta to hand on, if it is one with text."""
        if not self._conversation.entered:
            raise ContextClosedError("the context was left while it answered; nothing was recorded")
        if isinstance(event, Completion):
            self._commit(event, stopped=False)
            return None
        if self._first is None:
            self._first = time.perf_counter()
        self._ids.extend(event.ids)
        if not event.text:
            return None
        self._text.append(event.text)
        self._whole = len(self._ids)
        return event

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
        prompt_tokens = len(self._pending.ids)
        cached = self._pending.predicted_cached_tokens
        ids = tuple(self._ids[: self._whole])
        text = "".join(self._text)
        completion = Completion(
            text=text,
            ids=ids if ids or not text else None,
            finish_reason=FinishReason.LENGTH,
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
        reply = self._conversation.commit(self._pending, self._shadow, completion, stopped=stopped)
        self.reply = reply
        self._span.finish(reply.report)
        return reply
