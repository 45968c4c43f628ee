"""Checks of the server as a whole: whether it answers, to whom, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from agentkv.doctor.findings import Outcome, failed, ok, unchecked, warning
from agentkv.doctor.session import Session
from agentkv.errors import CapabilityError

_METRICS_FIX = (
    "let the address pass /metrics on too; else give block_size= to VLLMBackend, and a miss then has no cause"
)


def reachable(session: Session) -> Outcome:
    """Whether an answer comes at all."""
    if session.listing.status_code >= 500 or session.listing.status_code == 429:
        return failed(str(session.http.refusal("/v1/models", session.listing)))
    return ok(session.http.url)


def api_key(session: Session) -> Outcome:
    """Whether the key is taken, or none is needed."""
    given = session.http.options.api_key is not None
    if session.listing.status_code in (401, 403):
        said = str(session.http.refusal("/v1/models", session.listing))
        return failed(
            f"{'the API key is refused' if given else 'an API key is asked for'}: {said}",
            "put the server's key into the environment variable that --api-key-env names (VLLM_API_KEY)",
        )
    return ok("accepted" if given else "none is asked for")


def model(session: Session) -> Outcome:
    """Whether the model is served, and how long its context is."""
    try:
        found = session.model
    except CapabilityError as error:
        return failed(str(error), "give --model NAME, one of those that are served")
    if found.context_window is None:
        return warning(
            f"{found.name}; its context length is not told",
            "give context_window= to the backend: it is needed",
        )
    return ok(f"{found.name}, {found.context_window:,} tokens of prompt and answer together")


def version(session: Session) -> Outcome:
    """Which version of vLLM it is."""
    answer = session.http.get("/version")
    told = session.http.value(answer) if answer.is_success else {}
    number = told.get("version") if isinstance(told, Mapping) else None
    if not number:
        return unchecked("the server does not tell (no /version): is it vLLM, and is a gateway in front?")
    return ok(f"vLLM {number}")


def metrics(session: Session) -> Outcome:
    """Whether ``/metrics`` answer, and are those of vLLM."""
    if session.metrics is None:
        return warning("/metrics does not answer", _METRICS_FIX)
    if session.cache.block_size is None:
        return warning("/metrics does not tell the block size of the prefix cache", _METRICS_FIX)
    enabled = {True: "on", False: "off", None: "not told"}[session.cache.enabled]
    return ok(f"blocks of {session.cache.block_size:,} tokens, prefix caching {enabled}, as it says")


def restarts(session: Session) -> Outcome:
    """Whether a restart, which empties the cache, can be told from an eviction."""
    if session.metrics is None:
        return unchecked("/metrics does not answer")
    if session.cache.started is None:
        return warning(
            "no process_start_time_seconds in /metrics: a miss after a restart is not told from an eviction",
            "let the address pass /metrics on as vLLM writes it",
        )
    started = datetime.fromtimestamp(session.cache.started, UTC)
    return ok(f"visible; the process was started {started:%Y-%m-%d %H:%M:%S} UTC")
