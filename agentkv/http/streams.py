"""Streams of server-sent events: until when they may last, and the JSON values in them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from time import monotonic
from typing import Any, Final, cast

import httpx2

from agentkv.errors import BackendError
from agentkv.http.failures import late, told

DONE: Final = "[DONE]"
"""The data of the last event of an answer."""
_LONGEST_EVENT: Final = 1 << 28
"""Bytes; the first event may repeat a prompt's ids, seven bytes each."""


class _Timed(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The bytes of an answer, which no server can drip beyond a deadline."""

    def __init__(self, response: httpx2.Response, url: str, deadline: float) -> None:
        self._stream = response.stream
        self._url = url
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        for piece in cast("httpx2.SyncByteStream", self._stream):
            self._check()
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in cast("httpx2.AsyncByteStream", self._stream):
            self._check()
            yield piece

    def _check(self) -> None:
        if monotonic() > self._deadline:
            raise late(self._url)

    def close(self) -> None:
        cast("httpx2.SyncByteStream", self._stream).close()

    async def aclose(self) -> None:
        await cast("httpx2.AsyncByteStream", self._stream).aclose()


def limit(response: httpx2.Response, url: str, deadline: float) -> None:
    """Let the reading of an answer fail with `BackendTimeoutError` once a deadline has passed."""
    response.stream = _Timed(response, url, deadline)


def events(response: httpx2.Response) -> httpx2.EventSource:
    """Return the server-sent events of an answer."""
    return httpx2.EventSource(response, _LONGEST_EVENT)


def value(url: str, event: httpx2.ServerSentEvent) -> Mapping[str, Any]:
    """Return the JSON object of an event.

    Raises
    ------
    BackendError, ContextWindowError
        It is none, or the server tells of an error.
    """
    try:
        loaded = json.loads(event.data)
    except ValueError as error:
        raise BackendError(f"{url} streamed something that is not JSON; nothing was recorded") from error
    if not isinstance(loaded, Mapping):
        raise BackendError(f"{url} streamed JSON that is no object; nothing was recorded")
    if loaded.get("error"):
        raise told(url, loaded["error"])
    if event.event == "error" or loaded.get("object") == "error":
        raise told(url, loaded)
    return loaded
