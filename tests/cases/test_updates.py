"""Many updates of one field: coalesced, bounded, and summed up in time."""

from __future__ import annotations

import pytest

from agentkv import AgentKVContext, Field, Policy, Profile, Restate
from agentkv.entries import Erratum, RebaseReason
from agentkv.plan import AppendErratum, Rebase
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import frozen, only_grew, said

RULES = Policy("Refund within thirty days.")


@pytest.mark.parametrize("updates", [1, 3, 10, 50])
def test_updates_between_two_turns_are_one(updates: int) -> None:
    """Only the last value is told, whatever came before it (K55)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("limit", "v0")]) as context:
        context.ask("Hello")
        for number in range(1, updates + 1):
            context.set("limit", f"v{number}")
        erratum = context.ask("And?").report.erratum
    assert erratum == said(1, "Limit", old="v0", new=f"v{updates}")


def test_a_value_that_came_back_before_it_was_told_is_not_a_change() -> None:
    """A, B, A between two turns says nothing (K55)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as context:
        context.ask("Hello")
        context.set("f", "b")
        context.set("f", "a")
        assert context.ask("And?").report.plan == ()


def test_a_value_that_came_back_after_another_was_told_is_said() -> None:
    """What the prefix says is no longer what the model was told last (K55)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as context:
        context.ask("Hello")
        for value in ("b", "a"):
            context.set("f", value)
            assert value in context.ask("And?").report.erratum.strip(".").split()[-1:]
    assert only_grew(backend)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_superseded_values_of_one_field_never_exceed_the_profiles_number(most: int) -> None:
    """One more opens a new epoch, in which only the current value stands (K55)."""
    backend = ScriptedBackend()
    profile = Profile(max_superseded=most, max_errata_share=1.0, snapshot_every=99, restate=Restate.NEVER)
    others = [Field(f"other{number}", number) for number in range(19)]
    with AgentKVContext(backend, [RULES, *others, Field("f", "v0.")], profile=profile) as context:
        context.ask("Hello")
        for number in range(1, 30):
            context.set("f", f"v{number}.")
            report = context.ask("And?").report
            stated = frozen(context.ledger).fields["f"]
            told = [
                stated,
                *(
                    s.now
                    for e in context.ledger.epoch_entries()
                    if isinstance(e, Erratum)
                    for s in e.statements
                ),
            ]
            assert told[-1] == f"v{number}."
            assert len(told) - 1 <= most
            assert (report.plan == (Rebase(RebaseReason.SUPERSEDED),)) is (number % (most + 1) == 0)
            if stated == f"v{number}.":
                assert "Update" not in backend.prompts[-1].partition("And?")[2]


def test_every_so_many_errata_are_a_snapshot_of_all_that_was_told() -> None:
    """No field's last statement is further back than the profile's number of errata (K55)."""
    backend = ScriptedBackend()
    profile = Profile(snapshot_every=4, max_superseded=99, max_errata_share=1.0)
    fields = [Field(f"field{number}", 0) for number in range(5)]
    with AgentKVContext(backend, [RULES, *fields], profile=profile) as context:
        context.ask("Hello")
        for number in range(1, 13):
            context.set(f"field{number % 5}", number)
            report = context.ask("And?").report
            (step,) = report.plan
            assert isinstance(step, AppendErratum)
            assert step.snapshot is (number % 4 == 0)
            if step.snapshot:
                assert all(f"Field{other}: " in report.erratum for other in range(5))
    assert only_grew(backend)


def test_errata_never_take_more_of_the_window_than_the_profile_allows() -> None:
    """Beyond the share a new epoch is opened, though no field was superseded often (K55)."""
    backend = ScriptedBackend(context_window=8000)
    profile = Profile(max_errata_share=0.05, max_superseded=99, snapshot_every=99)
    fields = [Field(f"field{number}", "old") for number in range(40)]
    reasons: set[RebaseReason] = set()
    with AgentKVContext(backend, [RULES, *fields], profile=profile) as context:
        context.ask("Hello")
        for number in range(40):
            context.set(f"field{number}", f"a new value, number {number}")
            report = context.ask("And?").report
            reasons.update(step.reason for step in report.plan if isinstance(step, Rebase))
            assert context.ledger.state.errata_tokens <= 0.05 * 8000 + len(report.erratum)
    assert reasons == {RebaseReason.SHARE}
