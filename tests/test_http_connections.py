"""Connections are used again, shared by threads and event loops, and closed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentkv.errors import (
    BackendConnectionError,
    BackendRequestError,
)
from agentkv.http import Post
from tests.http_calls import (
    PATH,
    POST,
    astreamed_values,
    client_of,
    streamed_values,
)
from tests.server.proxy import Ending, Exchange, Proxy, answered, streamed


@pytest.fixture
def server() -> Iterator[Proxy]:
    """A server of scripted answers."""
    with Proxy() as made:
        yield made


def test_a_connection_is_used_again_for_calls_and_streams(server: Proxy) -> None:
    """Also after a refusal and a whole stream; after a broken stream there is a new one."""
    server.script(
        answered(200, "1"),
        answered(404, "no"),
        streamed("{}", "[DONE]"),
        streamed("{}", ending=Ending.CLOSED),
        answered(200, "2"),
        path=PATH,
    )
    client = client_of(server)
    client.post(POST)
    with pytest.raises(BackendRequestError):
        client.post(POST)
    streamed_values(client)
    assert server.accepted == 1
    with pytest.raises(BackendConnectionError):
        streamed_values(client)
    client.post(POST)
    assert server.accepted == 2
    client.close()


async def test_an_asynchronous_connection_is_used_again(server: Proxy) -> None:
    """As a synchronous one, and closed by `aclose`."""
    server.script(answered(200, "1"), streamed("{}", "[DONE]"), answered(200, "2"), path=PATH)
    client = client_of(server)
    await client.apost(POST)
    await astreamed_values(client)
    assert server.accepted == 1
    await client.aclose()
    await client.apost(POST)
    assert server.accepted == 2
    await client.aclose()


def test_a_closed_client_opens_new_connections(server: Proxy) -> None:
    """Closing is not an end."""
    server.always(answered(200, "1"), PATH)
    client = client_of(server)
    for _ in range(2):
        assert client.post(POST) == 1
        client.close()
    assert server.accepted == 2


@pytest.mark.filterwarnings("error")
def test_a_client_that_nobody_holds_closes_its_connections(server: Proxy) -> None:
    """Synchronous ones, and those of a running event loop; no ResourceWarning tells of them."""
    server.always(answered(200, "1"), PATH)

    async def use() -> int:
        client = client_of(server)
        client.post(POST)
        await client.apost(POST)
        del client
        gc.collect()
        return server.accepted

    assert asyncio.run(use()) == 2
    gc.collect()


@pytest.mark.filterwarnings("error")
def test_one_client_serves_event_loops_one_after_the_other(server: Proxy) -> None:
    """Each has connections of its own, which are closed with the loop."""
    server.always(answered(200, "1"), PATH)
    client = client_of(server)

    async def twice() -> None:
        await client.apost(POST)
        await client.apost(POST)

    for _ in range(3):
        asyncio.run(twice())
        gc.collect()
    assert server.accepted == 3


def test_event_loops_at_once_have_connections_of_their_own(server: Proxy) -> None:
    """One client, a loop in each thread."""
    server.always(answered(200, "1"), PATH)
    client, gate = client_of(server), threading.Barrier(8)

    async def several() -> list[int]:
        await asyncio.to_thread(gate.wait)
        return list(await asyncio.gather(*[client.apost(POST) for _ in range(4)]))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: asyncio.run(several()), range(8))) == [[1] * 4] * 8


def test_thirty_two_threads_share_a_client(server: Proxy) -> None:
    """Each gets the answer to its own request."""

    def echo(exchange: Exchange) -> None:
        exchange.answer(200, exchange.seen.body, {})

    server.always(echo, PATH)
    client, gate = client_of(server), threading.Barrier(32)

    def ask(number: int) -> list[Any]:
        gate.wait()
        return [client.post(Post.json(PATH, [number, again])) for again in range(5)]

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, range(32)))
    assert answers == [[[number, again] for again in range(5)] for number in range(32)]
    assert server.accepted <= 32
    client.close()


async def test_a_stream_that_is_left_ends_the_request(server: Proxy) -> None:
    """The server sees the client leave, and the next call is a new connection."""
    left = threading.Event()

    def watch(exchange: Exchange) -> None:
        exchange.open()
        exchange.piece(b"data: {}\n\n")
        exchange.end(Ending.STALL)
        left.set()

    server.always(watch, PATH)
    client = client_of(server)
    async with client.aevents(POST) as chunks:
        assert await anext(_typed(chunks)) == {}
    assert await asyncio.to_thread(left.wait, 30)
    left.clear()
    with client.events(POST) as values:
        assert next(values) == {}
    assert await asyncio.to_thread(left.wait, 30)
    await client.aclose()


def _typed(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return chunks
