"""Reports: predicted against observed, and why."""

from __future__ import annotations

from agentkv import Document, Field, Inline, Policy, SessionReport
from agentkv.backends.base import Capabilities
from agentkv.miss import Miss
from agentkv.testing import ScriptedBackend
from agentkv.turn import predict_cached
from tests.desk import Order, desk


def test_tokens_add_up_to_the_prompt() -> None:
    """Exact, spliced and computed tokens are the prompt's, in each turn and in the sums."""
    backend, order = ScriptedBackend(block_size=16), Order()
    with desk(backend, order) as ctx:
        reports = [ctx.ask("a").report]
        for status in ("lost", "found", "found"):
            order.status = status
            reports.append(ctx.ask("b").report)
    for report in reports:
        assert report.cached_tokens + report.spliced_tokens + report.computed_tokens == report.prompt_tokens
        assert report.cached_tokens == report.predicted_cached_tokens
    total = ctx.report
    assert total.cached_tokens + total.spliced_tokens + total.computed_tokens == total.prompt_tokens
    assert total.prompt_tokens == sum(report.prompt_tokens for report in reports)
    assert total.generated_tokens == sum(report.generated_tokens for report in reports)
    assert (total.turns, total.epochs, total.errata, total.mispredicted) == (4, 1, 2, 0)
    assert total.last == reports[-1]
    assert total.cached_share == total.cached_tokens / total.prompt_tokens


def test_share_before_the_first_turn_is_zero() -> None:
    """No division by zero."""
    assert SessionReport().cached_share == 0.0


def test_first_turn_is_cold_and_a_hit_has_no_miss() -> None:
    """Turn one misses as nothing was sent before; turn two reuses all that was."""
    with desk(ScriptedBackend()) as ctx:
        assert ctx.ask("a").report.miss is Miss.COLD
        assert ctx.ask("b").report.miss is None


def test_rebase_names_what_broke_the_prefix() -> None:
    """The field that changed, and the segment that shows it."""
    backend = ScriptedBackend()
    parts = [Document("d", Inline("On {x}.")), Field("x", 1), Field("y", 1)]
    with desk(backend, *parts, mode="off") as ctx:
        ctx.ask("a")
        ctx.set("x", 2)
        ctx.set("y", 2)
        report = ctx.ask("b").report
    assert report.miss is Miss.REBASED
    assert report.broken_by == "x in document:d, y"
    assert "x in document:d" in str(report)
    assert ctx.report.epochs == 2


def test_prefix_shorter_than_a_block_misses() -> None:
    """A cache keeps whole blocks only."""
    with desk(ScriptedBackend(block_size=4096)) as ctx:
        ctx.ask("a")
        report = ctx.ask("b").report
    assert (report.miss, report.predicted_cached_tokens) == (Miss.SHORT, 0)


def test_evicted_prefix_is_lost() -> None:
    """Fewer cached tokens than predicted are counted and named."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("a")
        backend.evict()
        report = ctx.ask("b").report
    assert (report.miss, report.cached_tokens) == (Miss.LOST, 0)
    assert ctx.report.mispredicted == 1


def test_prefix_is_shared_within_a_tenant_only() -> None:
    """A second context of the tenant finds the first one's prefix; another tenant's does not."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("a")
    with desk(backend) as second:
        shared = second.ask("another").report
    with desk(backend, tenant="other") as third:
        alone = third.ask("another").report
    assert (shared.miss, shared.predicted_cached_tokens) == (Miss.SHARED, 0)
    assert shared.cached_tokens > len("Be brief.")
    assert (alone.miss, alone.cached_tokens) == (Miss.COLD, 0)


def test_server_that_does_not_count_is_named() -> None:
    """Without counts there is no observation to compare."""
    backend = ScriptedBackend()
    backend.capabilities = Capabilities("silent", 100_000, 1, cached_counts=False)
    with desk(backend) as ctx:
        assert ctx.ask("a").report.miss is Miss.UNREPORTED


def test_prediction_follows_the_rule_of_paged_caches() -> None:
    """Whole blocks of what is common, computed and not the last token."""
    assert predict_cached(256, 255, 300, 32) == 224
    assert predict_cached(256, 256, 257, 32) == 256
    assert predict_cached(256, 256, 256, 32) == 224
    assert predict_cached(10, 10, 10, 1) == 9
    assert predict_cached(0, 0, 0, 16) == 0


def test_new_tokens_are_those_behind_the_last_answer() -> None:
    """What a turn adds: its text, its erratum and what the template writes."""
    backend = ScriptedBackend()
    with desk(backend, Field("x", 1)) as ctx:
        first = ctx.ask("a").report
        known = ctx.ledger.ids
        assert known is not None
        report = ctx.ask("b").report
    assert first.new_tokens == first.prompt_tokens
    assert report.new_tokens == report.prompt_tokens - len(known)


def test_report_reads_as_one_line() -> None:
    """Turn, plan and tokens for people."""
    with desk(ScriptedBackend(), Policy("Two.", name="two")) as ctx:
        text = str(ctx.ask("a").report)
    assert text.startswith("turn 1: rebase(first turn); ")
    assert text.endswith("first prompt of the conversation")
