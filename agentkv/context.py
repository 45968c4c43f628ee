"""`AgentKVContext`: one conversation, synchronously."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from agentkv.backends.base import Delta, Event
from agentkv.conversation import Conversation
from agentkv.exchange import Exchange, Steps
from agentkv.fanout import branches, warming
from agentkv.fanout import warm as compute_shared
from agentkv.inputs import Input, UserMessage
from agentkv.reply import Reply
from agentkv.surface import ContextSurface, as_inputs


class Stream:
    """An answer while it is made: iterate it for deltas, then read `reply`.

    Leaving the iteration early, `close`, or an error discards the turn; `keep` records what has come.
    """

    def __init__(self, conversation: Conversation, exchange: Exchange, steps: Steps) -> None:
        self._conversation = conversation
        self._exchange = exchange
        self._steps = steps
        self._events: Iterator[Event] | None = conversation.backend.stream(exchange.request)

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return self._exchange.reply

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if not self._steps.begin():
            raise StopIteration
        delta: Delta | None = None
        over = True
        try:
            delta = self._advance()
        except Exception:
            if not self._steps.over:
                raise
            # It was closed from elsewhere: what fails then is nobody's concern.
        finally:
            over = self._steps.end(more=delta is not None)
            if over:
                self._finish()
        if delta is None or over:
            raise StopIteration
        return delta

    def _advance(self) -> Delta | None:
        for event in self._events or ():
            delta = self._exchange.feed(event)
            if delta is not None:
                return delta
            if self._exchange.reply is not None:
                break  # what fails behind the completion cannot undo it
        self._exchange.ended()
        return None

    def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer.

        Raises
        ------
        BackendError
            The stream was closed before.
        ContextBusyError
            Another thread is waiting for the next delta: keep the stream there.
        ContextClosedError
            The context was left before; nothing was recorded.
        """
        if self._steps.begin():
            try:
                self._stop()
                self._exchange.keep()
            finally:
                self._steps.end(more=False)
                self._finish()
        return self._exchange.ended()

    def close(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept.

        From another thread than the one that waits for the next delta, the model is stopped once it gives
        one; the iteration then ends, and the context is busy until it has.
        """
        if self._steps.stop():
            self._finish()

    def _finish(self) -> None:
        try:
            self._stop()
        finally:
            self._events = None
            self._exchange.drop()
            self._conversation.release()

    def _stop(self) -> None:
        close = getattr(self._events, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_events"):
            self.close()


class AgentKVContext(ContextSurface):
    """One conversation of a prompt, in which only differences are told.

    Use it as a context manager: entering checks what the backend can do, leaving releases what it holds.
    See `ContextSurface` for the arguments and for declaring fields and segments.
    """

    def __enter__(self) -> Self:
        self._conversation.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversation.leave()

    def ask(self, text: str, **sampling: Any) -> Reply:
        """Send what the user said, and return the whole answer; see `send`."""
        return self.send(UserMessage(text), **sampling)

    def send(self, *inputs: Input | str, **sampling: Any) -> Reply:
        """Send inputs and return the whole answer.

        Parameters
        ----------
        inputs
            `UserMessage`, `ToolResult`, or a str for what the user said.
        sampling
            Fields of `SamplingOptions` to change for this call.

        Raises
        ------
        InputError, ContextWindowError, BackendError
            Nothing was recorded; the same call can be made again.
        ContextBusyError
            Another call is running on this context.
        """
        stream = self._open(as_inputs(inputs), sampling)
        for _ in stream:
            pass
        return stream._exchange.ended()

    def stream(self, *inputs: Input | str, **sampling: Any) -> Stream:
        """Send inputs and return the answer while it is made; arguments and errors as `send`."""
        return self._open(as_inputs(inputs), sampling)

    def fan_out(self, count: int, *, warm: bool = True) -> list[Self]:
        """Return branches that go on from here, each to be entered by itself, and run side by side.

        Parameters
        ----------
        count
            How many.
        warm
            Whether to have what they share computed first: sent at once with a cold cache, each of them would
            compute all of it. If that fails they are returned all the same.

        Raises
        ------
        ContextClosedError
            The context is not open.
        """
        made = branches(self._conversation, count)
        request = warming(self._conversation, self._conversation.read()) if warm else None
        if request is not None:
            compute_shared(self._conversation, request)
        return [self._of(conversation) for conversation in made]

    def _open(self, inputs: list[Input], sampling: dict[str, Any]) -> Stream:
        conversation, steps = self._conversation, Steps()
        conversation.acquire()
        exchange: Exchange | None = None
        try:
            exchange = Exchange.plan(conversation, conversation.read(), inputs, sampling, steps)
            return Stream(conversation, exchange, steps)
        except BaseException:
            if exchange is not None:
                exchange.drop()
            conversation.release()
            raise
