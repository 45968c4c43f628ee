"""What the backends that talk to a server share: one call, synchronously and asynchronously."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from agentkv.backends.answers import AnswerReader
from agentkv.backends.base import Capabilities, Completion, Event, Request
from agentkv.errors import ConfigurationError
from agentkv.http import HttpClient, Post, ServerOptions
from agentkv.tokenizer import ChatTokenizer


def check_tokens(**numbers: int | None) -> None:
    """Refuse numbers of tokens that are none; None stands for one that is asked of the server.

    Raises
    ------
    ConfigurationError
        The message names the argument and its value.
    """
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name}={value!r} has to be a whole number of tokens, at least 1")


class ServedBackend(ABC):
    """A server behind HTTP. Safe to share between threads, contexts and event loops.

    A call that is closed or cancelled ends on the server too. Nothing is retried once a token has come.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._http = HttpClient(options)

    @property
    def url(self) -> str:
        """The server's address."""
        return self._http.url

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the server can do; the first time it is asked."""

    @property
    @abstractmethod
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer and chat template that prompts are made with."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Refuse what the server cannot do."""

    def _needs(self, request: Request) -> Post | None:
        """Return what has to be asked before the call, if anything."""
        return None

    @abstractmethod
    def _post(self, request: Request, reader: AnswerReader, answered: Any) -> Post:
        """Return the call whose answer `reader` reads; `answered` is what `_needs` gave."""

    @abstractmethod
    def _reader(self, request: Request) -> AnswerReader:
        """Return what reads the answer."""

    def _parse(self, request: Request, reader: AnswerReader) -> Post | None:
        """Return what has to be asked behind the answer, if anything."""
        return None

    def _completed(self, request: Request, reader: AnswerReader, parsed: Any) -> Completion:
        """Return the whole answer; `parsed` is what `_parse` gave."""
        return reader.completion()

    def _explained(self, request: Request, reader: AnswerReader, completion: Completion) -> Completion:
        """Return a completion that says what was cached or loaded, and why not more; may ask the server."""
        return completion

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one call; closing the iterator early ends it on the server.

        Raises
        ------
        CapabilityError, ConfigurationError
            The server cannot do what is asked, or an option is wrong; raised at once.
        BackendError, ContextWindowError
            The call failed; nothing was delivered after the failure.
        """
        self._check(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Event]:
        reader, deadline = self._reader(request), self._http.deadline()
        needed = self._needs(request)
        answered = None if needed is None else self._http.post(needed, deadline)
        with self._http.events(self._post(request, reader, answered), deadline) as chunks:
            for chunk in chunks:
                delta = reader.feed(chunk)
                if delta is not None:
                    yield delta
        rest = reader.rest()
        if rest is not None:
            yield rest
        parse = self._parse(request, reader)
        parsed = None if parse is None else self._http.post(parse, deadline)
        yield self._explained(request, reader, self._completed(request, reader, parsed))

    async def astream(self, request: Request) -> AsyncIterator[Event]:
        """As `stream`, for ``async for``; cancelling ends the call on the server."""
        await asyncio.to_thread(self._check, request)
        reader, deadline = self._reader(request), self._http.deadline()
        needed = self._needs(request)
        answered = None if needed is None else await self._http.apost(needed, deadline)
        async with self._http.aevents(self._post(request, reader, answered), deadline) as chunks:
            async for chunk in chunks:
                delta = reader.feed(chunk)
                if delta is not None:
                    yield delta
        rest = reader.rest()
        if rest is not None:
            yield rest
        parse = self._parse(request, reader)
        parsed = None if parse is None else await self._http.apost(parse, deadline)
        completion = self._completed(request, reader, parsed)
        yield await asyncio.to_thread(self._explained, request, reader, completion)

    def release(self, conversation: str) -> None:  # noqa: B027 - nothing to do is what all of them do
        """Do nothing: a server's prefix cache does not know conversations, and forgets by itself."""

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._http.close()

    async def aclose(self) -> None:
        """As `close`, with the connections of this event loop."""
        await self._http.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
