"""What a server's failure means: one of agentkv's errors, with the server's own words."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeGuard

import httpx2

from agentkv.errors import (
    AgentKVError,
    BackendAuthError,
    BackendBusyError,
    BackendConnectionError,
    BackendError,
    BackendRequestError,
    BackendTimeoutError,
    ContextWindowError,
)
from agentkv.http.words import words

_CONTEXT_LENGTH: Final = (
    "maximum context length",
    "context_length_exceeded",
    "max_model_len",
    "context window",
)


class RetryableError(Exception):
    """A failure after which the same bytes may be sent again.

    Parameters
    ----------
    error
        What to raise when no attempt is left.
    wait_s
        The wait that the server asks for, in seconds; None if it names none.
    """

    def __init__(self, error: AgentKVError, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


def refused(url: str, status: int, body: str, headers: Mapping[str, str]) -> AgentKVError | RetryableError:
    """Return what an answer other than 2xx means."""
    said = words(body) or "no reason given"
    answer = f"{url} answered {status}: {said}"
    if status in (429, 503):
        error = BackendBusyError(f"{answer}; the server is overloaded or starting, try again later")
        return RetryableError(error, retry_after(headers))
    if status in (401, 403):
        return BackendAuthError(f"{answer}; check api_key, and whether the server offers this endpoint")
    if status in {408, 504}:
        return BackendTimeoutError(answer)
    if 300 <= status < 400:
        elsewhere = headers.get("location") or "an address that it does not name"
        return BackendRequestError(f"{url} answered {status}: it is found at {elsewhere}; correct base_url")
    if 400 <= status < 500:
        if status in (400, 413, 422) and any(mark in body.lower() for mark in _CONTEXT_LENGTH):
            return ContextWindowError(
                f"{answer}; shorten the history (rebase with a summary), remove segments or lower max_tokens"
            )
        return BackendRequestError(answer)
    return BackendError(answer)


def told(url: str, error: Any) -> AgentKVError:
    """Return what an error in the midst of a stream means; it is never retried."""
    status = error.get("code") if isinstance(error, Mapping) else None
    found = refused(url, status if _is_failure(status) else 500, json.dumps({"error": error}), {})
    return final(found)


def final(found: AgentKVError | RetryableError) -> AgentKVError:
    """Return what to raise where nothing is tried again."""
    return found.error if isinstance(found, RetryableError) else found


def cut_off(url: str) -> RetryableError:
    """Return what an answer that ended before its end means."""
    return RetryableError(
        BackendConnectionError(
            f"the answer of {url} ended in its midst: the server stopped or lost the connection"
        )
    )


def late(url: str) -> BackendTimeoutError:
    """Return what a call that passed its deadline means."""
    return BackendTimeoutError(f"{url} took longer than deadline_s allows: raise it, or lower max_tokens")


def no_stream(url: str, error: httpx2.HTTPError | httpx2.StreamError) -> BackendError:
    """Return what an answer that is no stream of events means."""
    return BackendError(f"{url} does not stream its answer ({error}): is it an OpenAI-compatible server?")


def broken(url: str, error: httpx2.HTTPError) -> AgentKVError | RetryableError:
    """Return what a failed connection means."""
    said = str(error) or type(error).__name__
    if _untrusted(error):
        return BackendConnectionError(
            f"{url} shows a certificate that is not trusted ({said}): give the file of its authority's as "
            "verify="
        )
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError | httpx2.PoolTimeout):
        return RetryableError(
            BackendConnectionError(
                f"{url} cannot be reached ({said}): is the server running, and the address right?"
            )
        )
    if isinstance(error, httpx2.TimeoutException):
        return BackendTimeoutError(
            f"{url} was silent for too long ({said}): raise stall_s, or deadline_s where that is shorter"
        )
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.ProxyError):
        return BackendConnectionError(f"{url} cannot be reached ({said}): check base_url and proxy")
    if isinstance(error, httpx2.LocalProtocolError):
        # Its text repeats headers.
        return BackendConnectionError(f"HTTP forbids the form of the request to {url}: check its headers")
    return RetryableError(BackendConnectionError(f"the connection to {url} broke ({said})"))


def _untrusted(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_failure(status: object) -> TypeGuard[int]:
    return isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that a ``Retry-After`` header names, in seconds; None without a readable one."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
