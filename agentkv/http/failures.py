"""What a server's failure means: one of agentkv's errors, with the server's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

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

_MOST_WORDS: Final = 400
_INPUT: Final = re.compile(r"""(['"]input['"]: )('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,}]*)""")
"""Where validation errors repeat what was sent."""
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


def words(body: str) -> str:
    """Return what a server says in an error, in one line, shortened, without what was sent to it."""
    try:
        said = _message(json.loads(body))
    except ValueError:
        said = body
    said = " ".join(_INPUT.sub(r"\1…", said).split())
    return said if len(said) <= _MOST_WORDS else f"{said[:_MOST_WORDS]}…"


def _message(loaded: Any) -> str:
    while isinstance(loaded, Mapping):
        for key in ("error", "message", "detail", "msg"):
            if loaded.get(key):
                loaded = loaded[key]
                break
        else:
            break
    return loaded if isinstance(loaded, str) else json.dumps(loaded, ensure_ascii=False)


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
    if 400 <= status < 500:
        if status in (400, 413, 422) and any(mark in body.lower() for mark in _CONTEXT_LENGTH):
            return ContextWindowError(
                f"{answer}; shorten the history (rebase with a summary), remove segments or lower max_tokens"
            )
        return BackendRequestError(answer)
    return BackendError(answer)


def told(url: str, error: Any) -> AgentKVError:
    """Return what an error in the midst of a stream means."""
    status = error.get("code") if isinstance(error, Mapping) else None
    found = refused(url, status if isinstance(status, int) else 500, json.dumps({"error": error}), {})
    return found.error if isinstance(found, RetryableError) else found


def broken(url: str, error: httpx2.HTTPError) -> AgentKVError | RetryableError:
    """Return what a failed connection means."""
    said = str(error) or type(error).__name__
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError | httpx2.PoolTimeout):
        return RetryableError(
            BackendConnectionError(
                f"{url} cannot be reached ({said}): is the server running, and the address right?"
            )
        )
    if isinstance(error, httpx2.TimeoutException):
        return BackendTimeoutError(
            f"{url} was silent for too long ({said}): raise stall_s if the server needs more time"
        )
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.ProxyError):
        return BackendConnectionError(f"{url} cannot be reached ({said}): check base_url and proxy")
    return RetryableError(BackendConnectionError(f"the connection to {url} broke ({said})"))


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
