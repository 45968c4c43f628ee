"""Each reason for a new epoch, and the mode that rewrites every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentkv import (
    AgentKVContext,
    Deletion,
    Document,
    Field,
    Mode,
    Policy,
    Profile,
    Restate,
    Skill,
    Tools,
    Wording,
)
from agentkv.costs import Costs
from agentkv.entries import RebaseReason
from agentkv.errors import ConfigurationError, ContextWindowError, SegmentError
from agentkv.plan import AppendErratum, AppendSegment, Rebase, describe
from agentkv.testing import ByteTokenizer, Scripted, ScriptedBackend
from tests.desk import Order, cancel, desk, epochs, errata, extends, lookup, new_text, reason


class OtherTokenizer(ByteTokenizer):
    """The same bytes under another fingerprint."""

    fingerprint = "other"  # type: ignore[misc]


def changed(profile: Profile, *values: object, **options: Any) -> tuple[ScriptedBackend, AgentKVContext]:
    """Tell one field's values, a turn each, and return backend and context."""
    backend = options.pop("backend", None) or ScriptedBackend()
    with desk(
        backend, Field("x", "start", critical=options.pop("critical", False)), profile=profile, **options
    ) as ctx:
        ctx.ask("Hi")
        for value in values:
            ctx.set("x", value)
            ctx.ask("Hm")
    return backend, ctx


def reasons(ctx: AgentKVContext) -> list[RebaseReason]:
    """Return why each epoch but the first was opened."""
    first, *others = (entry.reason for entry in epochs(ctx.ledger))
    assert first is RebaseReason.FIRST
    return others


def test_plain_change_opens_no_epoch() -> None:
    """An erratum is said, and every prompt begins with the one before."""
    backend, ctx = changed(Profile(), 1, 2, 3)
    assert reasons(ctx) == []
    assert all(extends(backend))


def test_requested_rebase_clears_errata_and_keeps_the_talk() -> None:
    """The new epoch shows current values in its prompt and none of the errata."""
    backend = ScriptedBackend(["First answer."])
    with desk(backend, Order()) as ctx:
        ctx.ask("one")
        ctx.set("order.status", "lost")
        ctx.ask("two")
        ctx.rebase()
        assert reason(ctx.ask("three")) is RebaseReason.REQUESTED
        assert reason(ctx.ask("four")) is None
    assert "Update 1" in backend.prompts[1]
    assert "Update 1" not in backend.prompts[2]
    assert "- Order status: lost" in backend.prompts[2]
    assert "First answer." in backend.prompts[2]


def test_too_many_superseded_values_open_an_epoch() -> None:
    """One more superseded value than the profile allows, of one field."""
    assert reasons(changed(Profile(max_superseded=2), 1, 2)[1]) == []
    assert reasons(changed(Profile(max_superseded=2), 1, 2, 3)[1]) == [RebaseReason.SUPERSEDED]


def test_long_new_value_opens_an_epoch() -> None:
    """A value whose changed part is longer than an erratum may be."""
    profile = Profile(max_statement_chars=100)
    assert reasons(changed(profile, "y" * 101)[1]) == [RebaseReason.LARGE]
    assert reasons(changed(profile, "y" * 90)[1]) == []


def test_share_of_the_window_opens_an_epoch() -> None:
    """Errata that take more of the window than the profile allows."""
    backend = ScriptedBackend(context_window=4000)
    ctx = changed(Profile(max_errata_share=0.02), 1, 2, 3, backend=backend)[1]
    assert reasons(ctx) == [RebaseReason.SHARE]


def test_restating_alone_has_a_bound_too() -> None:
    """A profile that always restates opens an epoch although nothing changes any more."""
    backend = ScriptedBackend(context_window=4000)
    with desk(backend, Field("x", 1), profile=Profile(restate=Restate.ALWAYS, max_errata_share=0.05)) as ctx:
        ctx.ask("Hi")
        ctx.set("x", 2)
        for _ in range(12):
            ctx.ask("Hm")
    assert RebaseReason.SHARE in reasons(ctx)


def test_cost_opens_an_epoch() -> None:
    """Measured costs under which carrying errata is dearer than one prefill."""
    n, x = 1_000_000, 1000.0
    costs = Costs(
        prefill_s=1e-9, prefilled=10**9, prefill_seconds=1.0, calls=n, answer_tokens=100.0, turns_ahead=1000,
        sum_x=n * x, sum_y=n * x, sum_xx=n * x * x * 1.1, sum_xy=n * x * x * 1.1, sum_yy=n * x * x * 1.1,
    )  # fmt: skip
    assert reasons(changed(Profile(), 1, 2, costs=costs)[1]) == [RebaseReason.COST]


def test_critical_field_opens_an_epoch_where_obedience_is_unknown_or_low() -> None:
    """A critical field is appended only where the model was measured to heed errata."""
    assert reasons(changed(Profile(), 1, critical=True)[1]) == [RebaseReason.CRITICAL]
    assert reasons(changed(Profile(obedience=0.5), 1, critical=True)[1]) == [RebaseReason.CRITICAL]
    assert reasons(changed(Profile(obedience=0.95), 1, critical=True)[1]) == []


def test_overflowing_window_opens_an_epoch_without_errata() -> None:
    """Counted before it is sent, with the answer's room: the prompt is written anew if that fits."""
    backend = ScriptedBackend(context_window=700)
    with desk(backend, Field("x", "start" * 10), profile=Profile(max_errata_share=1.0)) as ctx:
        replies = [ctx.ask("Hi", max_tokens=16)]
        while not any(why is RebaseReason.WINDOW for why in map(reason, replies)):
            ctx.set("x", f"{len(replies)}" * 50)
            replies.append(ctx.ask("Hm", max_tokens=16))
            assert len(replies) < 10
    assert all(len(request.ids) + 16 <= 700 for request in backend.requests)
    assert "Update 1:" not in backend.prompts[-1]
    assert "Update 1:" in backend.prompts[-2]


def test_prompt_that_never_fits_is_refused_and_nothing_changes() -> None:
    """When even a new epoch exceeds the window, nothing is sent or recorded, and a smaller call works."""
    backend = ScriptedBackend(context_window=800)
    with desk(backend, Field("x", "start")) as ctx:
        ctx.ask("Hi", max_tokens=16)
        ctx.set("x", "changed")
        before, sent = ctx.ledger, len(backend.requests)
        with pytest.raises(ContextWindowError, match="context window is 800"):
            ctx.ask("long" * 200, max_tokens=16)
        with pytest.raises(ContextWindowError, match="needs 700 more"):
            ctx.ask("Hm", max_tokens=700)
        assert ctx.ledger is before
        assert len(backend.requests) == sent
        ctx.ask("Hm", max_tokens=16)
    assert [entry.revision for entry in errata(ctx.ledger)] == [1]


def test_changed_policy_opens_an_epoch() -> None:
    """A new, changed or withdrawn policy is written into the prompt at once."""
    changes: list[Callable[[AgentKVContext], None]] = [
        lambda ctx: ctx.add(Policy("New.", name="second")),
        lambda ctx: ctx.add(Policy("Be long.")),
        lambda ctx: ctx.remove("policy:policy"),
    ]
    for change in changes:
        backend = ScriptedBackend()
        with desk(backend, Skill("s", "t")) as ctx:
            ctx.ask("Hi")
            change(ctx)
            assert reason(ctx.ask("Hm")) is RebaseReason.POLICY


def test_withdrawn_segment_opens_an_epoch_without_it() -> None:
    """A skill that is withdrawn is gone from the next prompt."""
    backend = ScriptedBackend()
    with desk(backend, Skill("s", "secret craft")) as ctx:
        ctx.ask("Hi")
        ctx.remove("skill:s", Deletion.WITHDRAWN)
        assert reason(ctx.ask("Hm")) is RebaseReason.WITHDRAWN
    assert "secret craft" not in backend.prompts[-1]


def test_template_arguments_open_an_epoch() -> None:
    """What the template is told is part of the prefix."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("Hi")
        ctx.set_template_arguments(enable_thinking=False)
        assert reason(ctx.ask("Hm")) is RebaseReason.MODEL
        assert reason(ctx.ask("Hm")) is None


def test_template_arguments_survive_a_ledger() -> None:
    """A tuple that comes back as a list is no change; what JSON cannot hold is refused."""
    backend = ScriptedBackend()
    with desk(backend, template_arguments={"sizes": (1, 2)}) as ctx:
        ctx.ask("Hi")
        with pytest.raises(SegmentError, match="give JSON values"):
            ctx.set_template_arguments(clock=print)
    options = {"template_arguments": {"sizes": (1, 2)}}
    with AgentKVContext.resume(backend, ctx.ledger.to_json(), [Policy("Be brief.")], **options) as resumed:
        assert resumed.ask("Hm").report.plan == ()


def test_another_tokenizer_opens_an_epoch_by_text() -> None:
    """Resumed on another model, answers are encoded from their text; nothing said is lost."""
    backend = ScriptedBackend([Scripted("Hello <|end|> there", ids=tuple(b"Hello there"))])
    with desk(backend) as ctx:
        ctx.ask("Hi")
    other = ScriptedBackend(tokenizer=OtherTokenizer())
    with AgentKVContext.resume(other, ctx.ledger.to_json(), [Policy("Be brief.")]) as resumed:
        assert reason(resumed.ask("Hm")) is RebaseReason.MODEL
        assert reason(resumed.ask("Hm")) is None
    assert "Hello there" in other.prompts[0]


def test_prefix_that_announces_no_errata_is_rewritten_before_one_is_said() -> None:
    """A ledger of another mode or wording opens an epoch with the first erratum, not before."""
    backend = ScriptedBackend()
    with desk(backend, Field("x", 1), mode="off") as ctx:
        ctx.ask("Hi")
    with AgentKVContext.resume(backend, ctx.ledger.to_json(), [Policy("Be brief."), Field("x", 1)]) as on:
        assert reason(on.ask("Hm")) is None
        on.set("x", 2)
        assert reason(on.ask("Hm")) is RebaseReason.UNANNOUNCED
        on.set("x", 3)
        assert reason(on.ask("Hm")) is None
    assert [entry.text for entry in errata(on.ledger)] == ["Update 1: the X is no longer 2. The X is now 3."]


def test_announcement_follows_the_wording() -> None:
    """Another wording is announced before it is used."""
    backend = ScriptedBackend()
    with desk(backend, Field("x", 1)) as ctx:
        ctx.ask("Hi")
    profile = Profile(wording=Wording(announcement="Lines with NEWS are true.", header="NEWS {revision}: "))
    with AgentKVContext.resume(
        backend, ctx.ledger.to_json(), [Policy("Be brief."), Field("x", 2)], profile=profile
    ) as resumed:
        assert reason(resumed.ask("Hm")) is RebaseReason.UNANNOUNCED
    assert "Lines with NEWS" in backend.prompts[-1]


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_other_modes_rewrite_the_prompt_and_announce_nothing(mode: str) -> None:
    """The prompt is as the caller would have it: current values, no errata, no word of them."""
    backend = ScriptedBackend()
    with desk(backend, Order(), mode=mode) as ctx:
        ctx.ask("Hi")
        ctx.set("order.status", "lost")
        assert reason(ctx.ask("Hm")) is RebaseReason.REWRITE
        assert reason(ctx.ask("Hm")) is None
    assert "Update" not in backend.prompts[0]
    assert "- Order status: lost" in backend.prompts[1]
    assert not errata(ctx.ledger)


def test_observe_sends_the_same_bytes_as_off() -> None:
    """What is observed does not depend on the observer."""
    sent = []
    for mode in ("off", "observe"):
        backend = ScriptedBackend()
        with desk(backend, Order(), Document("d", "x"), mode=mode) as ctx:
            ctx.ask("Hi")
            ctx.set("order.status", "lost")
            ctx.ask("Hm")
            ctx.remove("document:d")
            ctx.ask("Hm")
        sent.append([request.ids.tolist() for request in backend.requests])
    assert sent[0] == sent[1]


def test_observe_reports_what_would_have_been_cached() -> None:
    """After a change near the top, more would have been cached than was."""
    backend = ScriptedBackend()
    with desk(backend, Field("x", 1), mode=Mode.OBSERVE) as ctx:
        ctx.ask("Hi")
        ctx.set("x", 2)
        report = ctx.ask("Hm").report
    assert report.would_have_cached_tokens is not None
    assert report.would_have_cached_tokens > report.cached_tokens
    assert ctx.report.would_have_cached_tokens == report.would_have_cached_tokens


def test_environment_switches_agentkv_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """AGENTKV_MODE overrides what the code says; an unknown mode is refused."""
    monkeypatch.setenv("AGENTKV_MODE", " OFF ")
    assert changed(Profile(), 1)[1].mode is Mode.OFF
    monkeypatch.setenv("AGENTKV_MODE", "maybe")
    with pytest.raises(ConfigurationError, match="'maybe' is unknown"):
        desk(ScriptedBackend())


def test_revisions_are_unique_and_never_go_back() -> None:
    """Over rebases, failed calls, resume and erasure each erratum has the next number."""
    backend = ScriptedBackend(["OK", "OK", Scripted(error=ConnectionError("lost")), "OK"])
    with desk(backend, Field("x", 0), Field("y", "gone soon")) as ctx:
        ctx.ask("Hi")
        ctx.set("x", 1)
        ctx.ask("a")
        ctx.set("x", 2)
        with pytest.raises(ConnectionError):
            ctx.ask("b")
        ctx.ask("b")
        ctx.rebase()
        ctx.ask("c")
        ctx.set("x", 3)
        ctx.ask("d")
        ctx.remove("y", Deletion.HARD)
        ctx.ask("e")
    with AgentKVContext.resume(
        backend, ctx.ledger.to_json(), [Policy("Be brief."), Field("x", 4)]
    ) as resumed:
        resumed.ask("f")
    assert [entry.revision for entry in errata(resumed.ledger)] == [1, 2, 3, 4]


def test_added_segments_are_appended() -> None:
    """Skills, documents and tools that come later stand behind what was read; the prefix stays."""
    backend = ScriptedBackend()
    with desk(backend, Tools([lookup])) as ctx:
        ctx.ask("Hi")
        ctx.add(Skill("s", "craft"))
        ctx.add(Tools([cancel]))
        reply = ctx.ask("Hm")
    assert describe(reply.report.plan) == "append(skill:s, tool:cancel)"
    assert "## Skill: s\ncraft" in new_text(backend)
    assert '"name": "cancel"' in new_text(backend)
    assert all(extends(backend))


def test_plan_reads_as_one_line() -> None:
    """What a report shows of a plan."""
    assert describe(()) == "keep"
    assert describe((AppendSegment(), AppendErratum(restated=("a",)))) == "append() + erratum() again(a)"
    assert describe((Rebase(RebaseReason.COST),)) == "rebase(standing errata cost more than a rebase)"


def test_retrieval_appends_only_what_is_new() -> None:
    """Documents in another order, or again after a pause, cost nothing."""
    backend = ScriptedBackend()
    one, two = Document("one", "first text"), Document("two", "second text")
    with desk(backend) as ctx:
        ctx.retrieve([one, two])
        ctx.ask("a")
        for documents in ([two, one], [two], [], [one]):
            ctx.retrieve(documents)
            assert ctx.ask("b").report.plan == ()
        ctx.retrieve([one, Document("three", "third text")])
        assert describe(ctx.ask("c").report.plan) == "append(document:three)"
    assert all(extends(backend))
