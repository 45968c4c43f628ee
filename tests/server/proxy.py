"""A faulty HTTP server: scripted answers, or a real server's, broken on the way.

What is scripted happens to the next requests of a path, one entry each; all others are passed on. Without a
server behind it, it is a server of scripted answers only.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

COMPLETIONS = "/v1/completions"


class Ending(StrEnum):
    """How an answer ends before its end."""

    RESET = "reset"
    """The connection is reset (RST)."""
    CLEAN = "clean"
    """The last chunk of the body, as if it were whole."""
    CLOSED = "closed"
    """The connection is closed amid the body."""
    STALL = "stall"
    """Silence until the client leaves."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    """As it stands in the request line; a whole address where a client takes this for its proxy."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = field(repr=False)


class Exchange(BaseHTTPRequestHandler):
    """One request, and what behaviours answer it with."""

    protocol_version = "HTTP/1.1"
    server: _Server
    seen: Seen

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.seen = Seen(self.command, self.path, headers, body)
        try:
            self.server.proxy.behaviour(self.seen)(self)
        except OSError:
            self.close_connection = True  # one of both sides left

    do_GET = do_POST = do_CONNECT = _serve  # noqa: N815 - the names that the base class looks for

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def open(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        """Begin a streamed answer."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data: bytes) -> None:
        """Send a piece of a streamed answer; an empty one is its end."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, ending: Ending) -> None:
        """End the answer as a fault does."""
        self.close_connection = True
        match ending:
            case Ending.CLEAN:
                self.piece(b"")
            case Ending.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Closed behind the back of the server, which would end it politely.
                socket.close(self.connection.detach())
            case Ending.STALL:
                self.connection.recv(1)
            case Ending.CLOSED:
                pass

    @contextmanager
    def upstream(self) -> Iterator[http.client.HTTPResponse]:
        """Pass the request on, and give the answer before its body is read; leaving ends it."""
        sent = {name: value for name, value in self.seen.headers.items() if name != "host"}
        with closing(self.server.proxy.connect()) as connection:
            connection.request(
                self.seen.method, self.seen.path, self.seen.body or None, sent | {"connection": "close"}
            )
            with closing(connection.getresponse()) as response:
                yield response

    def forward(self, each: Callable[[int, bytes], bytes | None] = lambda _, event: event) -> bool:
        """Pass the request on and its answer back; False if `each` stopped a stream.

        Parameters
        ----------
        each
            Is given the number of an event, from 0, and its bytes; returns what to send, None to stop.
        """
        with self.upstream() as response:
            kind = response.headers.get("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                self.answer(response.status, response.read(), {"Content-Type": kind})
                return True
            self.open(kind)
            for index, event in enumerate(_events(response)):
                made = each(index, event)
                if made is None:
                    return False
                self.piece(made)
        self.piece(b"")
        return True


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    lines: list[bytes] = []
    while line := response.readline():
        lines.append(line)
        if not line.strip():
            yield b"".join(lines)
            lines.clear()


Behaviour = Callable[[Exchange], Any]
"""What happens to a request."""


def passed(exchange: Exchange) -> None:
    """Pass the request on and the answer back."""
    exchange.forward()


def answered(status: int, body: str = "", **headers: str) -> Behaviour:
    """Answer by itself; ``retry_after="1"`` gives the header of that name."""
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return lambda exchange: exchange.answer(status, body.encode(), named)


def streamed(*data: str, ending: Ending | None = None, kind: str = "text/event-stream") -> Behaviour:
    """Stream events by itself."""

    def behave(exchange: Exchange) -> None:
        exchange.open(kind)
        for text in data:
            exchange.piece(f"data: {text}\n\n".encode())
        exchange.end(Ending.CLEAN if ending is None else ending)
        exchange.close_connection = ending is not None

    return behave


def cut(ending: Ending, *, after: int | None = None, more: int = 0) -> Behaviour:
    """End an answer too early.

    Parameters
    ----------
    after
        Events that are passed on; None ends it before any byte, and nothing is asked of the server.
    more
        Bytes of the next event that are passed on as well.
    """

    def behave(exchange: Exchange) -> None:
        left: list[bytes] = []

        def each(index: int, event: bytes) -> bytes | None:
            if index < (after or 0):
                return event
            left.append(event[:more])
            return None

        if after is not None:
            exchange.forward(each)
            if more:
                exchange.piece(left[0])
        exchange.end(ending)

    return behave


def edited(change: Callable[[int, bytes], bytes]) -> Behaviour:
    """Change the events of an answer."""
    return lambda exchange: exchange.forward(change)


def watched(after: int, reached: threading.Event) -> Behaviour:
    """Pass everything on, and say when so many events have been."""

    def each(index: int, event: bytes) -> bytes:
        if index + 1 == after:
            reached.set()
        return event

    return lambda exchange: exchange.forward(each)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing joins them
    request_queue_size = 64

    def __init__(self, proxy: Proxy, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.proxy = proxy
        self.accepted = 0
        self.clients: set[socket.socket] = set()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def get_request(self) -> tuple[socket.socket, Any]:
        made, address = super().get_request()
        self.accepted += 1
        self.clients.add(made)
        return made, address

    def shutdown_request(self, request: Any) -> None:
        self.clients.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that leaves is what the tests are about."""


class Proxy:
    """A server on a loopback port, until its block is left.

    Parameters
    ----------
    upstream
        Address of the server behind it; None if everything is scripted.
    tls
        Makes it speak TLS.
    """

    def __init__(self, upstream: str | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._server = _Server(self, tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._script: dict[str, deque[Behaviour]] = {}
        self._always: dict[str, Behaviour] = {}
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def accepted(self) -> int:
        """How many connections came."""
        return self._server.accepted

    def script(self, *behaviours: Behaviour, path: str = COMPLETIONS) -> None:
        """Let the next requests of a path meet this, one after the other."""
        with self._lock:
            self._script[path] = deque(behaviours)

    def always(self, behaviour: Behaviour, path: str = COMPLETIONS) -> None:
        """Let all requests of a path meet this, but for those that are scripted."""
        with self._lock:
            self._always[path] = behaviour

    def seen(self, path: str = COMPLETIONS) -> list[Seen]:
        """Return the requests of a path so far, in order."""
        with self._lock:
            return [seen for seen in self._seen if urlsplit(seen.path).path == path]

    def behaviour(self, seen: Seen) -> Behaviour:
        """Note a request, and return what happens to it."""
        path = urlsplit(seen.path).path
        with self._lock:
            self._seen.append(seen)
            waiting = self._script.get(path)
            return waiting.popleft() if waiting else self._always.get(path, passed)

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection to the server behind it."""
        if self._upstream is None:
            raise ConnectionRefusedError("nothing is scripted for this request")
        return http.client.HTTPConnection(urlsplit(self._upstream).netloc, timeout=120)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        for client in list(self._server.clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


def bodies(seen: Iterable[Seen]) -> list[bytes]:
    """Return the bodies of requests."""
    return [request.body for request in seen]
