"""When a call is made again, and after how long."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any, Final

import tenacity

from agentkv.errors import BackendTimeoutError
from agentkv.http.failures import RetryableError
from agentkv.http.options import ServerOptions

_LOG: Final = logging.getLogger("agentkv.http")
_LONGEST_WAIT_S: Final = 30.0


def policy(options: ServerOptions, deadline: float) -> dict[str, Any]:
    """Return the arguments of tenacity's loops.

    Parameters
    ----------
    deadline
        When the whole call has to be over, by `time.monotonic`.
    """
    least = options.backoff_s
    growing = tenacity.wait_exponential(multiplier=least, max=_LONGEST_WAIT_S) + tenacity.wait_random(
        0, least
    )

    last: RetryableError | None = None

    def retry(state: tenacity.RetryCallState) -> bool:
        nonlocal last
        failure = _failure(state)
        if isinstance(failure, RetryableError):
            last = failure
            return True
        # What the deadline cuts short says less than the failure before it; `stop` then ends the call.
        cut_short = isinstance(failure, BackendTimeoutError) and monotonic() >= deadline
        return cut_short and last is not None

    def wait(state: tenacity.RetryCallState) -> float:
        failure = _failure(state)
        asked = failure.wait_s if isinstance(failure, RetryableError) else None
        return growing(state) if asked is None else asked

    def stop(state: tenacity.RetryCallState) -> bool:
        # A wait that would end behind the deadline is not begun.
        return state.attempt_number >= options.attempts or monotonic() + state.upcoming_sleep >= deadline

    def give_up(state: tenacity.RetryCallState) -> Any:
        if last is None:
            raise AssertionError  # pragma: no cover - nothing is retried without a failure
        raise last.error from _failure(state)

    def before_sleep(state: tenacity.RetryCallState) -> None:
        _LOG.warning(
            "attempt %d of %d failed, the next in %.1f s: %s",
            state.attempt_number,
            options.attempts,
            state.upcoming_sleep,
            _failure(state),
        )

    return {
        "retry": retry,
        "wait": wait,
        "stop": stop,
        "retry_error_callback": give_up,
        "before_sleep": before_sleep,
    }


def _failure(state: tenacity.RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()
