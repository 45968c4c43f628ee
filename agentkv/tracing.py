"""One OpenTelemetry span for each turn, where its API is installed; otherwise nothing.

Attributes are counts, times, keys and reasons, never prompt text or values. Token counts follow the
semantic conventions for generative AI.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from agentkv.plan import describe
from agentkv.report import TurnReport

SPAN: Final = "agentkv.turn"


@cache
def _api() -> Any:
    """Return OpenTelemetry's tracing API, or None; looked for once, as a failed import is slow."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


class TurnSpan:
    """The span of one call; does nothing where OpenTelemetry is not installed."""

    __slots__ = ("_span",)

    def __init__(self, backend: str, conversation: str) -> None:
        trace = _api()
        self._span: Any = None
        if trace is None:
            return
        self._span = trace.get_tracer("agentkv").start_span(
            SPAN,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.conversation.id": conversation,
                "agentkv.backend": backend,
            },
        )

    def finish(self, report: TurnReport) -> None:
        """End the span of a turn that was recorded."""
        if self._span is None:
            return
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": report.prompt_tokens,
                "gen_ai.usage.output_tokens": report.generated_tokens,
                "agentkv.turn": report.turn,
                "agentkv.epoch": report.epoch,
                "agentkv.plan": describe(report.plan),
                "agentkv.revision": report.revision,
                "agentkv.tokens.new": report.new_tokens,
                "agentkv.tokens.cached": report.cached_tokens,
                "agentkv.tokens.spliced": report.spliced_tokens,
                "agentkv.tokens.computed": report.computed_tokens,
                "agentkv.tokens.predicted_cached": report.predicted_cached_tokens,
                "agentkv.tokens.predicted_spliced": report.predicted_spliced_tokens,
                "agentkv.refused": ", ".join(f"{key}: {why.value}" for key, why in report.refused),
                "agentkv.ttft_s": report.ttft_s,
                "agentkv.miss": "" if report.miss is None else report.miss.value,
                "agentkv.broken_by": report.broken_by,
            }
        )
        self._close()

    def drop(self, why: str) -> None:
        """End the span of a call that recorded nothing; a span that has ended stays as it is."""
        if self._span is None:
            return
        self._span.set_attribute("agentkv.dropped", why)
        self._close()

    def _close(self) -> None:
        self._span.end()
        self._span = None
