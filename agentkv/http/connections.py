"""The open connections to one server: a pool for all threads, and one for each event loop."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import httpx2

from agentkv.errors import ConfigurationError, MissingDependencyError
from agentkv.http.options import ServerOptions


@dataclass(frozen=True, slots=True)
class _Pool:
    client: httpx2.AsyncClient
    closing: AsyncGenerator[None, None]
    """Its end closes the client: by `aclose`, by the end of the event loop or when nobody holds it."""


async def _closing(client: httpx2.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


class Connections:
    """Opens pools when they are first needed; safe to use from any thread and event loop.

    Raises
    ------
    ConfigurationError
        The file of trusted certificates cannot be read.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._verify: Final = _verification(options)
        self._lock = threading.Lock()
        self._sync: httpx2.Client | None = None
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()

    def client(self) -> httpx2.Client:
        """Return the client of synchronous calls."""
        with self._lock:
            if self._sync is None:
                self._sync = _made(httpx2.Client, self._settings())
            return self._sync

    async def aclient(self) -> httpx2.AsyncClient:
        """Return the client of the running event loop; it is closed when the loop shuts down."""
        loop = asyncio.get_running_loop()
        with self._lock:
            # A pool holds its loop: those of loops that ended are let go here.
            ended = [self._pools.pop(other) for other in list(self._pools) if other.is_closed()]
            pool = self._pools.get(loop)
        del ended
        if pool is None or pool.client.is_closed:
            client = _made(httpx2.AsyncClient, self._settings())
            pool = _Pool(client, _closing(client))
            # An event loop knows generators that have begun, and closes them when it shuts down.
            await anext(pool.closing)
            with self._lock:
                self._pools[loop] = pool
        return pool.client

    def close(self) -> None:
        """Close the connections of synchronous calls."""
        with self._lock:
            client, self._sync = self._sync, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.closing.aclose()

    def _settings(self) -> dict[str, Any]:
        o = self._options
        headers = dict(o.headers)
        if o.api_key is not None:
            headers["Authorization"] = f"Bearer {o.api_key}"
        return {
            "headers": headers,
            "verify": self._verify,
            "proxy": o.proxy,
            "trust_env": o.trust_env,
            # As many at once as there are conversations; the server queues what is too much.
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        }


def _made(kind: Any, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except ImportError as error:
        raise MissingDependencyError(
            f"the proxy needs a package that is not installed ({error}): install it, or use an HTTP proxy"
        ) from error
    except (ValueError, httpx2.InvalidURL) as error:
        raise ConfigurationError(
            f"the proxy, given or of the environment, cannot be used ({error})"
        ) from error


def _verification(options: ServerOptions) -> bool | ssl.SSLContext:
    verify = options.verify
    if not isinstance(verify, str):
        return verify
    try:
        folder = Path(verify).is_dir()
        return ssl.create_default_context(
            cafile=None if folder else verify, capath=verify if folder else None
        )
    except OSError as error:
        raise ConfigurationError(
            f"verify={verify!r} holds no certificates that can be read ({error}): give a PEM file"
        ) from error
