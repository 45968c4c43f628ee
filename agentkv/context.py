"""`AgentKVContext`: one conversation, synchronously."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from agentkv.backends.base import Delta, Event
from agentkv.conversation import Conversation
from agentkv.exchange import Exchange
from agentkv.inputs import Input, UserMessage
from agentkv.reply import Reply
from agentkv.surface import ContextSurface, as_inputs


class Stream:
    """An answer while it is made: iterate it for deltas, then read `reply`.

    Leaving the iteration early, `close`, or an error discards the turn; `keep` records what has come.
    """

    def __init__(self, conversation: Conversation, exchange: Exchange) -> None:
        self._conversation = conversation
        self._exchange = exchange
        self._events: Iterator[Event] | None = conversation.backend.stream(exchange.request)

    @property
    def reply(self) -> Reply | None:
        """The reply, once the answer is whole or was kept; None before."""
        return self._exchange.reply

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._events is None:
            raise StopIteration
        try:
            for event in self._events:
                delta = self._exchange.feed(event)
                if delta is not None:
                    return delta
                if self._exchange.reply is not None:
                    break  # what fails behind the completion cannot undo it
            self._exchange.ended()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def keep(self) -> Reply:
        """Stop the model and record what has come so far as its answer."""
        if self._exchange.reply is None and self._events is not None:
            try:
                self._stop()
                self._exchange.keep()
            finally:
                self.close()
        return self._exchange.ended()

    def close(self) -> None:
        """Stop the model and discard the turn, unless it is whole or was kept."""
        if self._events is not None:
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
        if getattr(self, "_events", None) is not None:
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

    def _open(self, inputs: list[Input], sampling: dict[str, Any]) -> Stream:
        conversation = self._conversation
        conversation.acquire()
        try:
            return Stream(conversation, Exchange.plan(conversation, inputs, sampling))
        except BaseException:
            conversation.release()
            raise
