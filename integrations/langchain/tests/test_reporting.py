"""Reports in traces."""

from __future__ import annotations

from langsmith.run_helpers import trace, tracing_context

from agents import Desk, report
from langchain_agentkv.reporting import emit, metadata_of


def test_a_traced_run_has_the_report_in_its_metadata():
    """What people look at in a trace: flat values, each name with our prefix."""
    with tracing_context(enabled="local"), trace("call") as run:
        emit({"plan": "keep", "turn": 3, "told": ["order.status"], "reason": "", "cached_tokens": None})
        metadata = dict(run.metadata)
    assert metadata["agentkv_plan"] == "keep"
    assert metadata["agentkv_turn"] == 3
    assert metadata["agentkv_told"] == "['order.status']"
    assert not {"agentkv_reason", "agentkv_cached_tokens"} & metadata.keys()


def test_outside_of_a_run_nothing_happens():
    """A report that nobody waits for is no error."""
    emit({"plan": "keep"})
    emit({})


def test_reports_hold_no_values():
    """Users see response metadata: it names fields, and never what they hold."""
    desk = Desk()
    desk.order.status = "a secret"
    first = report(desk.ask("Hello"))
    desk.order.status = "another secret"
    second = report(desk.ask("And?"))
    assert "secret" not in str([first, second])
    assert second["told"] == ["order.status"]
    assert "agentkv_told" in metadata_of(second)
