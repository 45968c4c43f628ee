"""Calls of every kind on a server of scripted answers: what the tests of `agentkv.http` share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentkv.http import HttpClient, Post, ServerOptions
from tests.server.proxy import Behaviour, Proxy, answered, streamed

KEY = "sk-a-key-of-the-tests"
SECRET = "my-header-secret"
PATH = "/v1/things"
POST = Post.json(PATH, {"prompt": "what nobody else reads", "value": "délivré"})
BUSY = '{"error": {"message": "the queue is full"}}'
Call = Callable[[HttpClient], Any]


def client_of(server: Proxy, **settings: Any) -> HttpClient:
    return HttpClient(ServerOptions(server.url, **{"backoff_s": 0.0, "trust_env": False, **settings}))


def posted(client: HttpClient) -> Any:
    return client.post(POST)


def streamed_values(client: HttpClient) -> list[Any]:
    with client.events(POST) as chunks:
        return list(chunks)


async def astreamed_values(client: HttpClient) -> list[Any]:
    async with client.aevents(POST) as chunks:
        return [chunk async for chunk in chunks]


def _run(call: Callable[[HttpClient], Awaitable[Any]]) -> Call:
    return lambda client: asyncio.run(call(client))  # type: ignore[arg-type]


_apost, _astream = _run(lambda client: client.apost(POST)), _run(astreamed_values)
VALUES = pytest.mark.parametrize("call", [posted, _apost], ids=["post", "apost"])
STREAMS = pytest.mark.parametrize("call", [streamed_values, _astream], ids=["events", "aevents"])
CALLS = pytest.mark.parametrize(
    "call", [posted, _apost, streamed_values, _astream], ids=["post", "apost", "events", "aevents"]
)


def good(call: Call) -> Behaviour:
    """Return an answer that a call gives as ``[{}]``."""
    return streamed("{}", "[DONE]") if call in (streamed_values, _astream) else answered(200, "[{}]")
