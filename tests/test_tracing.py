"""One span for each turn, without values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentkv import AgentKVContext, Field, Policy
from agentkv.errors import BackendError
from agentkv.testing import Scripted, ScriptedBackend

EXPORTER = InMemorySpanExporter()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What was exported; the provider can be set once in a process."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


def test_a_turn_is_a_span_of_counts_and_reasons(spans: InMemorySpanExporter) -> None:
    """Tokens, plan and prediction are attributes; values and prompt text are not."""
    with AgentKVContext(ScriptedBackend(), [Policy("Be brief."), Field("secret", "tulip")]) as ctx:
        ctx.ask("Hello there")
        ctx.set("secret", "orchid")
        report = ctx.ask("And now?").report
    first, second = spans.get_finished_spans()
    assert first.name == second.name == "agentkv.turn"
    attributes = dict(second.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == report.prompt_tokens
    assert attributes["agentkv.tokens.cached"] == report.cached_tokens
    assert attributes["agentkv.plan"] == "erratum(secret)"
    everything = " ".join(map(str, attributes.values()))
    assert not any(word in everything for word in ("tulip", "orchid", "Hello", "brief"))


def test_a_failed_or_stopped_call_ends_its_span(spans: InMemorySpanExporter) -> None:
    """A call that records nothing is a span that says so."""
    answers = [Scripted("Hel", error=BackendError("down"), fail_after=1), "Hello."]
    with AgentKVContext(ScriptedBackend(answers), [Policy("Be brief.")]) as ctx:
        with pytest.raises(BackendError):
            ctx.ask("Hi")
        with ctx.stream("Hi") as stream:
            next(stream)
    assert [dict(span.attributes or {})["agentkv.dropped"] for span in spans.get_finished_spans()] == [
        "stopped or failed",
        "stopped or failed",
    ]
