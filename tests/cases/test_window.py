"""Prompts that are too long, servers that cut them, and values that are huge."""

from __future__ import annotations

import hashlib

import pytest

from agentkv import AgentKVContext, Document, Field, Inline, Policy, Profile
from agentkv.entries import RebaseReason
from agentkv.errors import ContextWindowError, TruncationDetectedError
from agentkv.plan import AppendErratum, Rebase
from agentkv.testing import Scripted, ScriptedBackend
from tests.cases.prompts import only_grew

RULES = Policy("Refund within thirty days.")


def test_an_overlong_prompt_is_refused_before_it_is_sent() -> None:
    """With its size, the room that the answer needs, and the window (K34)."""
    backend = ScriptedBackend(context_window=4096)
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("Hello", max_tokens=100)
        with pytest.raises(ContextWindowError, match=r"\d{4} tokens .* needs 100 more.* 4096"):
            context.ask("x" * 6000, max_tokens=100)
        assert len(backend.requests) == 1
        assert context.report.turns == 1
        context.ask("Shorter", max_tokens=100)
    assert only_grew(backend)


def test_the_room_of_the_answer_counts() -> None:
    """A prompt that fits alone does not fit with what the answer may take (K34)."""
    backend = ScriptedBackend(context_window=1000)
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("Hello", max_tokens=500)
        room = 1000 - len(backend.requests[0].ids)
    with AgentKVContext(backend, [RULES]) as context:
        with pytest.raises(ContextWindowError, match=f"needs {room + 1} more"):
            context.ask("Hello", max_tokens=room + 1)
        assert context.ask("Hello", max_tokens=room).text == "OK."


def test_errata_give_way_before_the_window_overflows() -> None:
    """A new epoch without them is opened in time, and every segment stands in it whole (K34)."""
    document = Document("terms", "All of the terms. " * 20)
    backend = ScriptedBackend(context_window=2200)
    profile = Profile(max_errata_share=1.0, max_superseded=99, snapshot_every=99)
    with AgentKVContext(backend, [RULES, document, Field("f", 0)], profile=profile) as context:
        number, report = 0, context.ask("Hello", max_tokens=400).report
        for number in range(1, 40):
            report = context.ask("So?", max_tokens=400).report
            if Rebase(RebaseReason.WINDOW) in report.plan:
                break
            context.set("f", f"value {number} of a field that is long enough to fill the window soon")
        assert Rebase(RebaseReason.WINDOW) in report.plan
        assert len(backend.requests[-1].ids) + 400 <= 2200
        assert str(document.text).strip() in backend.prompts[-1]
        assert f"- F: value {number - 1} of a field" in backend.prompts[-1]


@pytest.mark.parametrize("read", [0, 1, 100])
def test_a_server_that_read_less_than_was_sent_is_found_out(read: int) -> None:
    """Nothing of the turn is recorded, and the same call sends the same bytes (K34)."""
    backend = ScriptedBackend(["Hello.", Scripted("Invented.", read_tokens=read), "Real."])
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as context:
        context.ask("One")
        context.set("f", "b")
        length = len(context.ledger)
        with pytest.raises(
            TruncationDetectedError, match=rf"prompt tokens were sent, but the server read {read}:"
        ):
            context.ask("Two")
        assert len(context.ledger) == length
        assert context.ask("Two").text == "Real."
    assert backend.requests[-1].ids == backend.requests[-2].ids


HUGE = "".join(f"Paragraph {number} of the manual.\n" for number in range(60_000))
"""About two million characters."""


def test_a_small_change_of_a_huge_value_is_said_as_the_part_that_changed() -> None:
    """With the length and digest of the whole, so that nothing is cut without a mark (K37)."""
    after = HUGE.replace("Paragraph 30000 of", "Paragraph 30000 in")
    backend = ScriptedBackend(context_window=20_000_000)
    with AgentKVContext(backend, [RULES, Field("doc", HUGE)]) as context:
        context.ask("One")
        context.set("doc", after)
        report = context.ask("Two").report
    (step,) = report.plan
    assert isinstance(step, AppendErratum)
    assert len(report.erratum) < 300
    assert f"{len(after)} characters" in report.erratum
    assert hashlib.sha256(after.encode()).hexdigest()[:16] in report.erratum


@pytest.mark.parametrize("inline", [False, True])
def test_a_huge_value_that_changed_all_over_opens_a_new_epoch(inline: bool) -> None:
    """It is written whole into the prompt once, never said in part (K37)."""
    old, new = (
        "".join(hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(3000)) for seed in "ab"
    )
    policy = Policy(Inline("The picture is {img}.")) if inline else RULES
    backend = ScriptedBackend(context_window=2_000_000)
    with AgentKVContext(backend, [policy, Field("img", old)]) as context:
        context.ask("One")
        context.set("img", new)
        report = context.ask("Two").report
    assert report.plan == (Rebase(RebaseReason.LARGE),)
    assert report.erratum == ""
    assert new in backend.prompts[-1]
    assert old not in backend.prompts[-1]


@pytest.mark.parametrize("length", [79, 80, 81, 200])
def test_no_erratum_exceeds_its_cap(length: int) -> None:
    """At the limit of the profile as beyond it (K37)."""
    backend = ScriptedBackend()
    profile = Profile(max_statement_chars=80)
    with AgentKVContext(backend, [RULES, Field("f", "short")], profile=profile) as context:
        context.ask("One")
        context.set("f", "x" * length)
        report = context.ask("Two").report
    assert len(report.erratum) < 80 + 120
    if length > 80:
        assert report.plan == (Rebase(RebaseReason.LARGE),)
    else:
        assert "x" * length in report.erratum
