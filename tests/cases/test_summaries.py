"""A summary must not bring back what is no longer true."""

from __future__ import annotations

import pytest

from agentkv import AgentKVContext, Field, Mode, Policy, Profile
from agentkv.entries import RebaseReason
from agentkv.plan import AppendErratum, Rebase
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import frozen, only_grew, said
from tests.templates import FAMILIES, load

RULES = Policy("Refund within thirty days.")
STALE = "The customer asked about an order of 80 with a limit of 100."
HEADING = "Summary of the conversation so far:"


def limited(backend: ScriptedBackend, mode: Mode = Mode.ON) -> AgentKVContext:
    """A conversation in which the limit fell from 100 to 50."""
    parts = [RULES, Field("limit", 100), Field("order", "on its way")]
    context = AgentKVContext(backend, parts, mode=mode)
    with context:
        context.ask("What is my limit?")
        context.set("limit", 50)
        context.ask("And now?")
    return context


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_superseded_value_in_a_summary_is_corrected_behind_it(name: str, keep_last: int) -> None:
    """The field is flagged; its current value stands behind the summary and before the question (K33)."""
    backend = ScriptedBackend(tokenizer=load(name))
    with limited(backend) as context:
        context.rebase(summary=STALE, keep_last=keep_last)
        report = context.ask("May I order for 80?").report
        assert report.plan == (Rebase(RebaseReason.REQUESTED), AppendErratum(restated=("limit",)))
        assert report.corrected == ("limit",)
        assert "outdated in the summary: limit" in str(report)
        assert report.erratum == said(2, "Limit", new="50")
        prompt = backend.prompts[-1]
        assert prompt.index(STALE) < prompt.index(report.erratum) < prompt.index("May I order for 80?")
        assert frozen(context.ledger).fields["limit"] == "50"
        sent = backend.requests[-1].ids
        report = context.ask("Sure?").report
        assert report.plan == ()
        if name != "mistral":
            assert backend.requests[-1].ids.common_prefix(sent) == len(sent)


def test_a_summary_of_what_is_true_needs_no_correction() -> None:
    """The new epoch holds the current values and no errata at all (K33)."""
    backend = ScriptedBackend()
    with limited(backend) as context:
        context.rebase(summary="The limit is 50, and the package is on its way.", keep_last=0)
        report = context.ask("May I order for 80?").report
        assert report.plan == (Rebase(RebaseReason.REQUESTED),)
        assert report.corrected == ()
        assert "Update 1" not in backend.prompts[-1]
        assert "100" not in backend.prompts[-1]
        assert context.ledger.state.errata_tokens == 0


@pytest.mark.parametrize("summary", ["Room 1001 was booked.", "It is 2100 now.", "Nothing happened."])
def test_a_part_of_a_longer_word_is_not_the_value(summary: str) -> None:
    """Values are looked for as whole words (K33)."""
    backend = ScriptedBackend()
    with limited(backend) as context:
        context.rebase(summary=summary, keep_last=0)
        assert context.ask("Hello?").report.corrected == ()


@pytest.mark.parametrize("summary", ["ON ITS WAY, they said.", "It was (on its way)"])
def test_a_value_is_found_in_other_letters_and_between_marks(summary: str) -> None:
    """A summary writes a value as its sentence needs it (K33)."""
    backend = ScriptedBackend()
    with limited(backend) as context:
        context.set("order", "delivered")
        context.rebase(summary=summary, keep_last=0)
        assert context.ask("Hello?").report.corrected == ("order",)


def test_a_summary_that_is_carried_on_is_checked_again() -> None:
    """What was true when it was written may not be at the next epoch (K33)."""
    backend = ScriptedBackend()
    profile = Profile(max_superseded=1)
    with AgentKVContext(backend, [RULES, Field("limit", 100)], profile=profile) as context:
        context.ask("What is my limit?")
        context.rebase(summary="The limit is 100.", keep_last=0)
        assert context.ask("So?").report.corrected == ()
        context.set("limit", 50)
        assert context.ask("So?").report.erratum
        context.set("limit", 25)
        report = context.ask("So?").report
        assert report.plan[0] == Rebase(RebaseReason.SUPERSEDED)
        assert report.corrected == ("limit",)
        prompt = backend.prompts[-1]
        assert prompt.index("The limit is 100.") < prompt.index(report.erratum)


def test_values_of_earlier_epochs_are_remembered() -> None:
    """A value that the last epoch no longer held is found in a summary all the same (K33)."""
    backend = ScriptedBackend()
    with limited(backend) as context:
        context.rebase()
        context.ask("So?")
        context.rebase(summary=STALE, keep_last=0)
        assert context.ask("So?").report.corrected == ("limit",)


def test_a_correction_of_a_secret_does_not_repeat_it() -> None:
    """It states what is true, not what was (K33, K60)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("code", "s3cret-1", sensitive=True)]) as context:
        context.ask("Hello")
        context.set("code", "s3cret-2")
        context.rebase(summary="They use s3cret-1.", keep_last=0)
        erratum = context.ask("So?").report.erratum
    assert "s3cret-2" in erratum
    assert "s3cret-1" not in erratum


def test_the_correction_survives_a_restart() -> None:
    """The stored record gives the same prompt, and the next turn says nothing twice (K33, K14)."""
    backend = ScriptedBackend()
    with limited(backend) as context:
        context.rebase(summary=STALE, keep_last=0)
        context.ask("May I?")
    parts = [RULES, Field("limit", 50), Field("order", "on its way")]
    with AgentKVContext.resume(backend, context.ledger.to_json(), parts) as resumed:
        assert resumed.ask("Sure?").report.plan == ()
    assert backend.requests[-1].ids.common_prefix(backend.requests[-2].ids) == len(backend.requests[-2].ids)


def test_with_agentkv_switched_off_nothing_is_added() -> None:
    """The prompt is the caller's own (K33)."""
    backend = ScriptedBackend()
    with limited(backend, Mode.OFF) as context:
        context.rebase(summary=STALE, keep_last=0)
        assert context.ask("May I?").report.erratum == ""
        assert f"{HEADING}\n{STALE}\n\nMay I?" in backend.prompts[-1]


def test_between_epochs_what_was_sent_is_never_shortened() -> None:
    """Ten long tool-like messages: only a rebase that was asked for prunes, all at once (K32)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES]) as context:
        for number in range(10):
            context.ask(f"Result {number}: " + "data " * 50)
        assert only_grew(backend)
        context.rebase(summary="Ten results were read.", keep_last=1)
        report = context.ask("So?").report
        assert report.plan == (Rebase(RebaseReason.REQUESTED),)
        assert "Result 8" not in backend.prompts[-1]
        assert "Result 9" in backend.prompts[-1]
    assert context.report.epochs == 2
