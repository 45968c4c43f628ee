"""A conversation with a server, for tests that are the same for both kinds of context."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Field, Policy, SamplingOptions
from agentkv.ledger import Ledger
from agentkv.reply import Reply
from tests.server.desk import fresh

SHORT: Final = SamplingOptions(max_tokens=5, extra={"ignore_eos": True})
LONG: Final = 6000
"""Tokens that take far longer than it is waited for their end."""


class Talk:
    """A conversation, synchronous or asynchronous, for a test that is the same for both."""

    def __init__(self, backend: Any, runner: asyncio.Runner | None) -> None:
        made: dict[str, Any] = {"tenant": fresh(), "sampling": SHORT}
        segments = [
            Policy("You are the support agent of a shop. " + "Refund within thirty days. " * 5),
            Field("status", "in transit", label="Order status"),
        ]
        self._runner = runner
        self.ctx: AgentKVContext | AsyncAgentKVContext = (
            AgentKVContext(backend, segments, **made)
            if runner is None
            else AsyncAgentKVContext(backend, segments, **made)
        )

    @property
    def ledger(self) -> Ledger:
        return self.ctx.ledger

    def ask(self, text: str, **sampling: Any) -> Reply:
        answer = self.ctx.ask(text, **sampling)
        if isinstance(answer, Reply):
            return answer
        assert self._runner is not None
        return self._runner.run(answer)

    def leave_after_two_pieces(self, text: str) -> None:
        """Ask for a long answer, and close its stream in its midst."""
        if isinstance(self.ctx, AgentKVContext):
            stream = self.ctx.stream(text, max_tokens=LONG)
            next(stream)
            next(stream)
            stream.close()
            return
        answer = self.ctx.stream(text, max_tokens=LONG)

        async def leave() -> None:
            await anext(answer)
            await anext(answer)
            await answer.aclose()

        assert self._runner is not None
        self._runner.run(leave())

    def cancel(self, text: str, begun: threading.Event) -> None:
        """Ask for a long answer in a task, and cancel it once the answer has begun."""
        ctx = self.ctx
        assert isinstance(ctx, AsyncAgentKVContext)
        assert self._runner is not None

        async def main() -> None:
            task = asyncio.ensure_future(ctx.ask(text, max_tokens=LONG))
            assert await asyncio.to_thread(begun.wait, 120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        self._runner.run(main())

    def enter(self) -> None:
        if isinstance(self.ctx, AgentKVContext):
            self.ctx.__enter__()
        else:
            assert self._runner is not None
            self._runner.run(self.ctx.__aenter__())

    def leave(self) -> None:
        if isinstance(self.ctx, AgentKVContext):
            self.ctx.__exit__(None, None, None)
        else:
            assert self._runner is not None
            self._runner.run(self.ctx.__aexit__(None, None, None))


Opener = Callable[..., Talk]
"""Opens a conversation of one kind on a backend."""
