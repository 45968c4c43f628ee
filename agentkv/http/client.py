"""HTTP with retries and deadlines, synchronous and asynchronous."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import (
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import httpx2
import tenacity

from agentkv.errors import AgentKVError, BackendConnectionError, BackendError
from agentkv.http import streams
from agentkv.http.connections import Connections
from agentkv.http.failures import RetryableError, broken, cut_off, final, late, no_stream, refused
from agentkv.http.options import ServerOptions
from agentkv.http.retries import policy


@dataclass(frozen=True, slots=True)
class Post:
    """A request with a JSON body; the very same bytes are sent at each attempt."""

    path: str
    """Behind the server's root, such as ``/v1/completions``."""
    content: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Post:
        """Return a request whose body is a value written as compact JSON."""
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        return cls(path, content, headers or {})


class HttpClient:
    """One server, reached by any number of threads and event loops at once.

    A call is repeated, with growing waits, where its connection failed or the server answered 429 or 503;
    never once something of a streamed answer has come.

    Raises
    ------
    ConfigurationError
        The file of trusted certificates cannot be read.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.url: Final = options.root
        self._connections: Final = Connections(options)

    def deadline(self) -> float:
        """Return when a call that begins now has to be over, by `time.monotonic`."""
        return monotonic() + self.options.deadline_s

    def get(self, path: str) -> httpx2.Response:
        """Return what the server answers to a GET, whatever its status; tried once.

        Raises
        ------
        BackendConnectionError, BackendTimeoutError
            There is no answer.
        """
        return self._once("GET", path, {})

    def try_post(self, post: Post) -> httpx2.Response:
        """As `get`, for a POST."""
        return self._once("POST", post.path, {"content": post.content, "headers": _headers(post)})

    def refusal(self, path: str, response: httpx2.Response) -> AgentKVError:
        """Return the error that an answer other than 2xx stands for."""
        return final(self._refused(self.url + path, response))

    def value(self, response: httpx2.Response) -> Any:
        """Return the JSON value of an answer.

        Raises
        ------
        BackendError, ContextWindowError
            It is none, or the status is not 2xx.
        """
        url = str(response.request.url)
        if not response.is_success:
            raise final(self._refused(url, response))
        return _json(url, response)

    def post(self, post: Post, deadline: float | None = None) -> Any:
        """Return the JSON value that the server answers.

        Parameters
        ----------
        deadline
            When it has to be over; by default `deadline`, from now on.

        Raises
        ------
        BackendError, ContextWindowError
            It did not, after all attempts; the error says why in the server's words.
        """
        deadline = self.deadline() if deadline is None else deadline
        url = self.url + post.path
        for attempt in tenacity.Retrying(**policy(self.options, deadline)):
            with attempt, _mapped(url), ExitStack() as trial:
                call = self._connections.client().stream("POST", url, **self._call(post, deadline))
                response = trial.enter_context(call)
                streams.limit(response, url, deadline)
                response.read()
                self._check(url, response)
                return _json(url, response)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    async def apost(self, post: Post, deadline: float | None = None) -> Any:
        """As `post`."""
        deadline = self.deadline() if deadline is None else deadline
        url = self.url + post.path
        async for attempt in tenacity.AsyncRetrying(**policy(self.options, deadline)):
            with attempt, _mapped(url):
                async with AsyncExitStack() as trial:
                    client = await self._connections.aclient()
                    call = client.stream("POST", url, **self._call(post, deadline))
                    response = await trial.enter_async_context(call)
                    streams.limit(response, url, deadline)
                    await response.aread()
                    self._check(url, response)
                    return _json(url, response)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    @contextmanager
    def events(self, post: Post, deadline: float | None = None) -> Iterator[Iterator[Any]]:
        """Stream the JSON objects of server-sent events; leaving the block ends the request on the server.

        Parameters
        ----------
        deadline
            When it has to be over; by default `deadline`, from now on.

        Raises
        ------
        BackendError, ContextWindowError
            The call failed, or the stream broke, stalled or ended before its end.
        """
        deadline = self.deadline() if deadline is None else deadline
        with ExitStack() as stack:
            first, rest = self._opened(post, deadline, stack)
            with closing(_values(self.url + post.path, first, rest)) as values:
                yield values

    def _opened(
        self, post: Post, deadline: float, stack: ExitStack
    ) -> tuple[httpx2.ServerSentEvent, Iterator[httpx2.ServerSentEvent]]:
        """Return the first event and the further ones; what they need is closed with the stack."""
        url = self.url + post.path
        for attempt in tenacity.Retrying(**policy(self.options, deadline)):
            with attempt, _mapped(url), ExitStack() as trial:
                call = self._connections.client().stream("POST", url, **self._call(post, deadline))
                response = trial.enter_context(call)
                streams.limit(response, url, deadline)
                if not response.is_success:
                    response.read()
                self._check(url, response)
                events = iter(streams.events(response))
                first = next(events, None)
                if first is None:
                    raise cut_off(url)
                stack.push(trial.pop_all())
                return first, events
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    @asynccontextmanager
    async def aevents(self, post: Post, deadline: float | None = None) -> AsyncIterator[AsyncIterator[Any]]:
        """As `events`, for ``async with`` and ``async for``."""
        deadline = self.deadline() if deadline is None else deadline
        async with AsyncExitStack() as stack:
            first, rest = await self._aopened(post, deadline, stack)
            async with aclosing(_avalues(self.url + post.path, first, rest)) as values:
                yield values

    async def _aopened(
        self, post: Post, deadline: float, stack: AsyncExitStack
    ) -> tuple[httpx2.ServerSentEvent, AsyncIterator[httpx2.ServerSentEvent]]:
        url = self.url + post.path
        async for attempt in tenacity.AsyncRetrying(**policy(self.options, deadline)):
            with attempt, _mapped(url):
                async with AsyncExitStack() as trial:
                    client = await self._connections.aclient()
                    call = client.stream("POST", url, **self._call(post, deadline))
                    response = await trial.enter_async_context(call)
                    streams.limit(response, url, deadline)
                    if not response.is_success:
                        await response.aread()
                    self._check(url, response)
                    events = aiter(streams.events(response))
                    first = await anext(events, None)
                    if first is None:
                        raise cut_off(url)
                    stack.push_async_exit(trial.pop_all())
                    return first, events
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    def close(self) -> None:
        """Close the connections of synchronous calls; a later call opens new ones."""
        self._connections.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and those of synchronous calls."""
        self.close()
        await self._connections.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_connections"):
            with suppress(Exception):
                self.close()

    def _once(self, method: str, path: str, content: dict[str, Any]) -> httpx2.Response:
        url, deadline = self.url + path, self.deadline()
        try:
            with _mapped(url), ExitStack() as trial:
                timeout = self._timeout(deadline)
                call = self._connections.client().stream(method, url, timeout=timeout, **content)
                response = trial.enter_context(call)
                streams.limit(response, url, deadline)
                response.read()
                return response
        except RetryableError as error:
            raise error.error from error
        raise AssertionError  # pragma: no cover - the block returns or raises

    def _call(self, post: Post, deadline: float) -> dict[str, Any]:
        return {"content": post.content, "headers": _headers(post), "timeout": self._timeout(deadline)}

    def _timeout(self, deadline: float) -> httpx2.Timeout:
        left = deadline - monotonic()
        if left <= 0:
            raise late(self.url)
        stall = min(self.options.stall_s, left)
        return httpx2.Timeout(stall, connect=min(self.options.connect_s, stall))

    def _check(self, url: str, response: httpx2.Response) -> None:
        if not response.is_success:
            raise self._refused(url, response)

    def _refused(self, url: str, response: httpx2.Response) -> AgentKVError | RetryableError:
        """Return what an answer other than 2xx means; some servers repeat the key that they refuse."""
        said, key = response.text, self.options.api_key
        return refused(url, response.status_code, said.replace(key, "…") if key else said, response.headers)


def _values(
    url: str, first: httpx2.ServerSentEvent, rest: Iterator[httpx2.ServerSentEvent]
) -> Generator[Any, None, None]:
    event: httpx2.ServerSentEvent | None = first
    with _final(url):
        while event is not None and event.data != streams.DONE:
            yield streams.value(url, event)
            event = next(rest, None)
        if event is None:
            raise cut_off(url)
    # Read to its end, the connection can be used again; what fails behind the answer concerns nobody.
    with suppress(httpx2.HTTPError, BackendError):
        for _ in rest:
            pass


async def _avalues(
    url: str, first: httpx2.ServerSentEvent, rest: AsyncIterator[httpx2.ServerSentEvent]
) -> AsyncGenerator[Any, None]:
    event: httpx2.ServerSentEvent | None = first
    with _final(url):
        while event is not None and event.data != streams.DONE:
            yield streams.value(url, event)
            event = await anext(rest, None)
        if event is None:
            raise cut_off(url)
    with suppress(httpx2.HTTPError, BackendError):
        async for _ in rest:
            pass


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    """Turn what the HTTP library raises into our errors."""
    try:
        yield
    except (httpx2.SSEError, httpx2.StreamError) as error:
        raise no_stream(url, error) from error
    except httpx2.HTTPError as error:
        raise broken(url, error) from error
    except httpx2.InvalidURL as error:
        raise BackendConnectionError(f"{url} is no address ({error})") from error


@contextmanager
def _final(url: str) -> Iterator[None]:
    """As `_mapped`; once an answer has begun nothing is retried."""
    try:
        with _mapped(url):
            yield
    except RetryableError as error:
        raise error.error from error


def _headers(post: Post) -> dict[str, str]:
    return {"Content-Type": "application/json", **post.headers}


def _json(url: str, response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise BackendError(
            f"{url} answered something that is not JSON: is it an OpenAI-compatible server?"
        ) from error
