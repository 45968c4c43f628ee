"""A callback handler that sums up what agentkv did in a session."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from langchain_agentkv.reporting import EVENT


@dataclass(frozen=True, slots=True)
class Session:
    """The calls that a handler has seen, summed up."""

    calls: int = 0
    """Model calls that were answered."""
    epochs: int = 0
    """Calls that wrote the current values into the prompt, the first included."""
    errata: int = 0
    """Calls that said something changed."""
    reasons: tuple[str, ...] = ()
    """Why each epoch was opened, in order."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the calls whose provider reports them."""
    predicted_cached_tokens: int = 0
    """Of token-exact models."""
    generated_tokens: int = 0
    new_tokens_estimated: int = 0
    would_have_new_tokens_estimated: int = 0
    """In mode ``observe``: what would have been new with agentkv."""
    last: Mapping[str, Any] | None = None
    """The last call's report."""

    @property
    def cached_share(self) -> float:
        """Cached tokens over prompt tokens; 0 before the first call."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {self.epochs} epochs opened, {self.errata} errata; "
            f"{self.prompt_tokens} prompt tokens, {self.cached_share:.1%} cached"
        )

    def add(self, report: Mapping[str, Any]) -> Session:
        """Return the sums with one more call."""
        reason = str(report.get("reason") or "")
        return replace(
            self,
            calls=self.calls + 1,
            epochs=self.epochs + bool(reason),
            errata=self.errata + bool(report.get("told")),
            reasons=(*self.reasons, reason) if reason else self.reasons,
            last=dict(report),
            **{name: getattr(self, name) + (report.get(name) or 0) for name in _SUMMED},
        )


_SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "predicted_cached_tokens",
    "generated_tokens",
    "new_tokens_estimated",
    "would_have_new_tokens_estimated",
)


class AgentKVCallbackHandler(BaseCallbackHandler):
    """Collects the reports of the runs that it is given to, in ``config={"callbacks": [handler]}``.

    It can be shared between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session = Session()
        self._reports: list[dict[str, Any]] = []

    @property
    def session(self) -> Session:
        """What it has seen so far, summed up."""
        return self._session

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports that it has seen, in order."""
        with self._lock:
            return list(self._reports)

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Take a call's report; other events are left alone."""
        if name != EVENT:
            return
        with self._lock:
            self._reports.append(dict(data))
            self._session = self._session.add(data)
