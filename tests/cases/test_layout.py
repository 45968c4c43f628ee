"""What stands where: clocks, ids and retrieved documents must not move what follows them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import (
    AgentKVContext,
    Deletion,
    Document,
    Field,
    Granularity,
    Inline,
    Ledger,
    Policy,
    Prompt,
    Scope,
    Skill,
    Tools,
)
from agentkv.diff import Difference, compare
from agentkv.prompt import Lint
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import begins_with, frozen, gone, news, only_grew, said, tool
from tests.templates import FAMILIES, load

RULES = "Refund within 30 days. " * 20
START = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def talk_over_a_clock(backend: ScriptedBackend, *, mode: str, granularity: Granularity) -> AgentKVContext:
    """Five turns, a minute apart."""
    clock = Clock()
    context = AgentKVContext(backend, [Policy(RULES)], mode=mode)
    context.field("clock", granularity=granularity)(clock)
    with context:
        for _ in range(5):
            context.ask("And now?")
            clock.now += timedelta(minutes=1)
    return context


def test_a_clock_that_ticks_every_turn_leaves_the_prefix_alone() -> None:
    """Each prompt begins with the whole one before it, and the time is told at the end only (K01)."""
    backend = ScriptedBackend()
    context = talk_over_a_clock(backend, mode="on", granularity=Granularity.MINUTE)
    assert only_grew(backend)
    assert "09:00" in frozen(context.ledger).system
    assert "09:04" in news(backend)
    assert "09:04" not in backend.prompts[-2]
    assert context.report.epochs == 1


def test_without_errata_the_same_clock_breaks_every_prefix() -> None:
    """The check of the test above can fail (K01)."""
    backend = ScriptedBackend()
    context = talk_over_a_clock(backend, mode="off", granularity=Granularity.MINUTE)
    assert not only_grew(backend)
    assert context.report.epochs == 5


def test_a_clock_cut_to_the_hour_says_nothing_within_it() -> None:
    """Precision that nobody needs costs nothing (K01)."""
    backend = ScriptedBackend()
    context = talk_over_a_clock(backend, mode="on", granularity=Granularity.HOUR)
    assert context.report.errata == 0


@pytest.mark.parametrize(
    "early",
    [Policy(Inline("Clock: {clock}."), name="clock"), Document("me", "I live in Bern.", scope=Scope.SESSION)],
)
def test_what_changes_before_what_does_not_is_found(early: Policy | Document) -> None:
    """A text with a field in it, or of one session, is reported before a shared one (K01, K03)."""
    prompt = Prompt.of([early, Policy(RULES), Field("clock", "09:00")])
    (finding,) = prompt.lint()
    assert finding.lint is Lint.VOLATILE_BEFORE_STATIC
    assert str(finding.lint) == "volatile before static"
    assert (finding.segment, finding.before) == (early.key, "policy:policy")
    assert prompt.arranged().lint() == ()
    assert prompt.arranged().segments[0].text == RULES


@pytest.mark.parametrize("name", FAMILIES)
def test_two_sessions_share_everything_before_their_own_values(name: str) -> None:
    """Policy and skill come before the user's id and folder on every template (K03)."""
    sent = []
    for user in ("u-1", "u-2"):
        backend = ScriptedBackend(tokenizer=load(name))
        own = [Field("user", user), Field("cwd", f"/data/{user}")]
        with AgentKVContext(backend, [*own, Policy(RULES), Skill("returns", "Ask for the box.")]) as context:
            context.ask("Hello")
        sent.append(backend.requests[0].ids)
    shared = load(name).decode(sent[0].tolist(0, sent[0].common_prefix(sent[1])))
    assert RULES.strip() in shared
    assert "Ask for the box." in shared
    assert shared.endswith("- User: u-")


def test_two_sessions_share_their_tools_in_any_order() -> None:
    """Tools are sorted by name, so the order in which they were found changes nothing (K03, K06)."""
    sent = []
    for order in ((tool("b"), tool("a")), (tool("a"), tool("b"))):
        backend = ScriptedBackend()
        with AgentKVContext(backend, [Tools(order), Policy(RULES)]) as context:
            context.ask("Hello")
        sent.append(backend.requests[0].ids)
    assert sent[0] == sent[1]


DOCS = {n: Document(f"d{n}", f"Text of document {n}.") for n in (1, 2, 3, 4)}


def retrieved(*numbers: int) -> list[Document]:
    return [DOCS[n] for n in numbers]


def test_the_order_of_a_retrieval_changes_nothing_and_new_documents_are_appended() -> None:
    """The same memories in another order, one more, then one less (K04)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [Policy(RULES), *retrieved(1, 2, 3)]) as context:
        context.ask("One")
        context.retrieve(retrieved(3, 1, 2))
        assert context.ask("Two").report.plan == ()
        context.retrieve(retrieved(1, 2, 3, 4))
        context.ask("Three")
        assert news(backend).count("Text of document") == 1
        assert "Text of document 4." in news(backend)
        context.retrieve(retrieved(1, 3, 4))
        assert context.ask("Four").report.plan == ()
        context.retrieve(retrieved(2))
        assert context.ask("Five").report.plan == ()
    assert only_grew(backend)


def test_a_document_that_is_revoked_gets_one_tombstone_and_can_come_back() -> None:
    """It is said to hold no longer, once; declared again it is told again (K04)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [Policy(RULES), *retrieved(1, 2)]) as context:
        context.ask("One")
        context.remove("document:d2", Deletion.SOFT)
        assert context.ask("Two").report.erratum == gone(1, "document 'd2'")
        assert context.ask("Three").report.plan == ()
        context.add(DOCS[2])
        context.ask("Four")
        assert "Text of document 2." in news(backend)
    assert only_grew(backend)


def test_a_document_that_changed_at_its_source_is_told_anew() -> None:
    """Its new text is appended; the prefix keeps the old one (K53)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [Policy(RULES), Document("file", "a = 1")]) as context:
        context.ask("One")
        context.add(Document("file", "a = 2"))
        context.ask("Two")
        assert "a = 2" in news(backend)
        context.add(Document("file", "a = 2"))
        assert context.ask("Three").report.plan == ()
    assert only_grew(backend)


PARTS = [*retrieved(1, 2, 3), Field("a", 1), Field("b", 2), Tools([tool("t")])]


@given(st.permutations(PARTS))
def test_no_order_of_declaration_is_a_difference(parts: list[Document | Field | Tools]) -> None:
    """Whatever is declared in whatever order compares equal to what was told (K04)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, PARTS) as context:
        context.ask("Hello")
        assert compare(Prompt.of(parts), context.ledger) == Difference()
        assert compare(Prompt.of(parts), Ledger()) == Difference()


def test_every_session_over_one_store_hears_of_a_change() -> None:
    """Another agent turns the lamp on: each conversation is told once, before its next turn (K52)."""
    from agentkv import mutable, mutable_fields

    @mutable_fields
    class Lamp:
        lamp: str = mutable(label="Lamp", default="off")

    lamp, backends = Lamp(), [ScriptedBackend(), ScriptedBackend()]
    contexts = [AgentKVContext(backend, [Policy(RULES), lamp]) for backend in backends]
    for context in contexts:
        with context:
            context.ask("Hello")
            before = context.ledger.ids
            assert before is not None
            assert context.report.errata == 0
            lamp.lamp = "on"
            reply = context.ask("Turn it off.")
            assert reply.report.erratum == said(1, "Lamp", old="off", new="on")
            assert context.ledger.ids is not None
            assert begins_with(context.ledger.ids, before)
            lamp.lamp = "off"


def test_read_from_its_end_the_prompt_states_the_latest_value() -> None:
    """The last statement about a field is the true one, whatever was told before (K52)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [Policy(Inline("The lamp is {lamp}.")), Field("lamp", "off")]) as context:
        context.ask("Hello")
        for value in ("on", "off", "broken", "off"):
            context.set("lamp", value)
            context.ask("Well?")
            told = [line for line in backend.prompts[-1].splitlines() if "lamp" in line.lower()]
            assert value in told[-1].strip(".").split()
            assert told[-1] not in told[:-1]
    assert only_grew(backend)
