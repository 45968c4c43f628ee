"""HTTP with retries and deadlines, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

import httpx2
import tenacity

from agentkv.errors import AgentKVError, BackendConnectionError, BackendError, BackendTimeoutError
from agentkv.http.failures import RetryableError, broken, refused, told
from agentkv.http.options import ServerOptions

_LOG: Final = logging.getLogger("agentkv.http")
_DONE: Final = "[DONE]"
_LONGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Post:
    """A request with a JSON body; the very same bytes are sent at each attempt."""

    path: str
    """Behind the server's root, such as ``/v1/completions``."""
    content: bytes
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
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.url: Final = options.root
        self._sync: httpx2.Client | None = None
        self._async: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, path: str) -> httpx2.Response:
        """Return what the server answers to a GET, whatever its status; tried once.

        Raises
        ------
        BackendConnectionError, BackendTimeoutError
            There is no answer.
        """
        try:
            return self._client().get(self.url + path)
        except httpx2.HTTPError as error:
            raise _final(broken(self.url + path, error)) from error

    def refusal(self, path: str, response: httpx2.Response) -> AgentKVError:
        """Return the error that an answer other than 2xx stands for."""
        return _final(refused(self.url + path, response.status_code, response.text, response.headers))

    def value(self, response: httpx2.Response) -> Any:
        """Return the JSON value of an answer.

        Raises
        ------
        BackendError, ContextWindowError
            It is none, or the status is not 2xx.
        """
        try:
            return _json(response)
        except RetryableError as error:
            raise error.error from error

    def try_post(self, post: Post) -> httpx2.Response:
        """As `get`, for a POST."""
        try:
            return self._client().post(self.url + post.path, content=post.content, headers=_headers(post))
        except httpx2.HTTPError as error:
            raise _final(broken(self.url + post.path, error)) from error

    def post(self, post: Post) -> Any:
        """Return the JSON value that the server answers.

        Raises
        ------
        BackendError, ContextWindowError
            It did not, after all attempts; the error says why in the server's words.
        """
        for attempt in tenacity.Retrying(**self._policy(monotonic() + self.options.deadline_s)):
            with attempt, _mapped(self.url + post.path):
                response = self._client().post(
                    self.url + post.path, content=post.content, headers=_headers(post)
                )
                return _json(response)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    async def apost(self, post: Post) -> Any:
        """As `post`."""
        async for attempt in tenacity.AsyncRetrying(**self._policy(monotonic() + self.options.deadline_s)):
            with attempt, _mapped(self.url + post.path):
                response = await self._aclient().post(
                    self.url + post.path, content=post.content, headers=_headers(post)
                )
                return _json(response)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    @contextmanager
    def events(self, post: Post) -> Iterator[Iterator[Any]]:
        """Stream the JSON values of server-sent events; leaving the block ends the request on the server.

        Raises
        ------
        BackendError, ContextWindowError
            The call failed, or the stream broke, stalled or ended before its end.
        """
        deadline = monotonic() + self.options.deadline_s
        url = self.url + post.path
        with ExitStack() as stack:
            first, rest = self._opened(post, deadline, stack)
            yield self._values(url, first, rest, deadline)

    def _opened(self, post: Post, deadline: float, stack: ExitStack) -> tuple[Any, Iterator[Any]]:
        url = self.url + post.path
        for attempt in tenacity.Retrying(**self._policy(deadline)):
            with attempt, _mapped(url), ExitStack() as trial:
                response = trial.enter_context(
                    self._client().stream("POST", url, content=post.content, headers=_headers(post))
                )
                if not response.is_success:
                    response.read()
                    raise _raised(refused(url, response.status_code, response.text, response.headers))
                events = iter(httpx2.EventSource(response))
                first = next(events, None)
                stack.push(trial.pop_all())
                return first, events
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    def _values(self, url: str, first: Any, rest: Iterator[Any], deadline: float) -> Iterator[Any]:
        event = first
        with _mapped(url, begun=True):
            while event is not None and event.data != _DONE:
                yield _value(url, event.data, deadline)
                event = next(rest, None)
            for _ in rest:
                pass  # read to its end, the connection can be used again
        if event is None:
            raise _cut_off(url)

    @asynccontextmanager
    async def aevents(self, post: Post) -> AsyncIterator[AsyncIterator[Any]]:
        """As `events`, for ``async with`` and ``async for``."""
        deadline = monotonic() + self.options.deadline_s
        url = self.url + post.path
        async with AsyncExitStack() as stack:
            first, rest = await self._aopened(post, deadline, stack)
            yield self._avalues(url, first, rest, deadline)

    async def _aopened(
        self, post: Post, deadline: float, stack: AsyncExitStack
    ) -> tuple[Any, AsyncIterator[Any]]:
        url = self.url + post.path
        async for attempt in tenacity.AsyncRetrying(**self._policy(deadline)):
            with attempt, _mapped(url):
                async with AsyncExitStack() as trial:
                    response = await trial.enter_async_context(
                        self._aclient().stream("POST", url, content=post.content, headers=_headers(post))
                    )
                    if not response.is_success:
                        await response.aread()
                        raise _raised(refused(url, response.status_code, response.text, response.headers))
                    events = aiter(httpx2.EventSource(response))
                    first = await anext(events, None)
                    stack.push_async_exit(trial.pop_all())
                    return first, events
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    async def _avalues(
        self, url: str, first: Any, rest: AsyncIterator[Any], deadline: float
    ) -> AsyncIterator[Any]:
        event = first
        with _mapped(url, begun=True):
            while event is not None and event.data != _DONE:
                yield _value(url, event.data, deadline)
                event = await anext(rest, None)
            async for _ in rest:
                pass
        if event is None:
            raise _cut_off(url)

    def close(self) -> None:
        """Close the connections of synchronous calls; a later call opens new ones."""
        with self._lock:
            client, self._sync = self._sync, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop, and those of synchronous calls."""
        self.close()
        client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            with suppress(Exception):
                self.close()

    def _client(self) -> httpx2.Client:
        with self._lock:
            if self._sync is None:
                self._sync = httpx2.Client(**self._settings())
            return self._sync

    def _aclient(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._async.get(loop)
        if client is None:
            client = self._async[loop] = httpx2.AsyncClient(**self._settings())
        return client

    def _settings(self) -> dict[str, Any]:
        o = self.options
        headers = dict(o.headers)
        if o.api_key is not None:
            headers["Authorization"] = f"Bearer {o.api_key}"
        stall = min(o.stall_s, o.deadline_s)
        return {
            "headers": headers,
            "verify": o.verify,
            "proxy": o.proxy,
            "trust_env": o.trust_env,
            "timeout": httpx2.Timeout(stall, connect=min(o.connect_s, stall)),
            # As many at once as there are conversations; the server queues what is too much.
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        }

    def _policy(self, deadline: float) -> dict[str, Any]:
        o = self.options

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            asked = error.wait_s if isinstance(error, RetryableError) else None
            grown = tenacity.wait_exponential_jitter(o.backoff_s, _LONGEST_WAIT_S, jitter=o.backoff_s)(state)
            return grown if asked is None else asked

        def stop(state: tenacity.RetryCallState) -> bool:
            # A wait that would end behind the deadline is not begun.
            return state.attempt_number >= o.attempts or monotonic() + wait(state) > deadline

        def give_up(state: tenacity.RetryCallState) -> Any:
            error = state.outcome.exception() if state.outcome is not None else None
            if isinstance(error, RetryableError):
                raise error.error from error
            raise BackendError(f"{self.url} gave no answer") from error  # pragma: no cover - only those retry

        def before_sleep(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            pause = state.next_action.sleep if state.next_action is not None else 0.0
            _LOG.warning(
                "attempt %d of %d failed, the next in %.1f s: %s",
                state.attempt_number,
                o.attempts,
                pause,
                error,
            )

        return {
            "retry": tenacity.retry_if_exception_type(RetryableError),
            "wait": wait,
            "stop": stop,
            "retry_error_callback": give_up,
            "before_sleep": before_sleep,
        }


@contextmanager
def _mapped(url: str, *, begun: bool = False) -> Iterator[None]:
    """Turn what the HTTP library raises into our errors; once an answer has begun none of them is retried."""
    try:
        yield
    except httpx2.HTTPError as error:
        found = broken(url, error)
        raise (_final(found) if begun else found) from error
    except httpx2.InvalidURL as error:
        raise BackendConnectionError(f"{url} is no address ({error})") from error
    except (httpx2.SSEError, httpx2.StreamError) as error:
        raise BackendError(
            f"{url} does not stream its answer ({error}): is it an OpenAI-compatible server?"
        ) from error


def _headers(post: Post) -> dict[str, str]:
    return {"Content-Type": "application/json", **post.headers}


def _raised(found: AgentKVError | RetryableError) -> AgentKVError | RetryableError:
    return found


def _final(found: AgentKVError | RetryableError) -> AgentKVError:
    return found.error if isinstance(found, RetryableError) else found


def _json(response: httpx2.Response) -> Any:
    url = str(response.request.url)
    if not response.is_success:
        raise _raised(refused(url, response.status_code, response.text, response.headers))
    try:
        return response.json()
    except ValueError as error:
        raise BackendError(
            f"{url} answered something that is not JSON: is it an OpenAI-compatible server?"
        ) from error


def _value(url: str, data: str, deadline: float) -> Any:
    if monotonic() > deadline:
        raise BackendTimeoutError(f"{url} took longer than deadline_s allows: raise it, or lower max_tokens")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise BackendError(f"{url} streamed something that is not JSON") from error
    if isinstance(value, Mapping) and value.get("error"):
        raise told(url, value["error"])
    return value


def _cut_off(url: str) -> BackendError:
    return BackendConnectionError(
        f"the answer of {url} ended in its midst: the server stopped or lost the connection"
    )
