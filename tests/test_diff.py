"""The difference is against what was told, never against what was frozen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentkv import Deletion, Document, Field, Ledger, Policy, Prompt, Skill, Tools
from agentkv.backends.base import Completion, FinishReason, Usage
from agentkv.costs import Costs
from agentkv.diff import Change, Gone, compare
from agentkv.inputs import UserMessage
from agentkv.outcome import finish
from agentkv.segments import Segment
from agentkv.testing import ScriptedBackend
from agentkv.traits import ModelTraits
from agentkv.turn import begin
from tests.desk import Order, cancel, desk, errata, lookup, new_text

BACKEND = ScriptedBackend()
TRAITS = ModelTraits(BACKEND.tokenizer, BACKEND.capabilities)


def told(prompt: Prompt, ledger: Ledger | None = None) -> Ledger:
    """Hold one turn of a prompt and return the ledger."""
    pending = begin(prompt, [UserMessage("Hi")], ledger or Ledger(), TRAITS, Costs())
    usage = Usage(len(pending.ids), 0, len(pending.ids), generated_tokens=1)
    return finish(pending, Completion("OK", (79, 75, 257), FinishReason.STOP, usage, 0.0, 0.0))[0]


def test_nothing_differs_before_the_first_turn() -> None:
    """Without an epoch there is nothing to compare with."""
    assert not compare(Prompt.of([Field("a", 1)]), Ledger())


def test_value_that_returns_to_the_frozen_one_is_a_change() -> None:
    """A→B→A with B told: the last told value is B, so A is said again."""
    first, second = Prompt.of([Field("a", "A")]), Prompt.of([Field("a", "B")])
    ledger = told(second, told(first))
    assert compare(first, ledger).changes == (Change("a", first.fields["a"], "B"),)


def test_value_that_returns_before_it_was_told_is_no_change() -> None:
    """A→B→A with nothing told in between says nothing."""
    prompt = Prompt.of([Field("a", "A")])
    assert not compare(prompt.with_texts({"a": "B"}).with_texts({"a": "A"}), told(prompt))


def test_order_of_declaration_is_no_difference() -> None:
    """Fields, segments and tools in another order say nothing."""
    one = Prompt.of(
        [Field("a", 1), Field("b", 2), Document("x", "1"), Document("y", "2"), Tools([lookup, cancel])]
    )
    two = Prompt.of(
        [Tools([cancel, lookup]), Document("y", "2"), Document("x", "1"), Field("b", 2), Field("a", 1)]
    )
    assert not compare(two, told(one))


def test_gone_things_are_deleted_as_their_kind_is() -> None:
    """Documents fall silent, policies are withdrawn, everything else gets a tombstone."""
    parts: list[Segment] = [Policy("p"), Document("d", "x"), Skill("s", "y"), Field("f", 1), Tools([lookup])]
    assert set(compare(Prompt.of([]), told(Prompt.of(parts))).gone) == {
        Gone("policy:policy", Deletion.WITHDRAWN, "policy 'policy'"),
        Gone("document:d", Deletion.DORMANT, "document 'd'"),
        Gone("skill:s", Deletion.SOFT, "skill 's'"),
        Gone("f", Deletion.SOFT, "F"),
        Gone("tool:lookup", Deletion.SOFT, "tool 'lookup'"),
    }


def test_a_tombstone_is_said_once() -> None:
    """What was said to be gone is no difference any more; when it comes back it is new."""
    full = Prompt.of([Policy("p"), Field("f", 1), Skill("s", "y"), Tools([lookup])])
    less = Prompt.of([Policy("p")])
    ledger = told(less, told(full))
    assert not compare(less, ledger)
    back = compare(full, ledger)
    assert [(change.key, change.told) for change in back.changes] == [("f", None)]
    assert [segment.key for segment in back.segments] == ["skill:s"]
    assert [tool.name for tool in back.tools] == ["lookup"]


def test_changed_text_and_schema_are_differences() -> None:
    """A segment or tool of the same name with other content is told again."""
    old = Prompt.of([Skill("s", "old"), Tools([{"name": "f", "description": "old"}])])
    new = Prompt.of([Skill("s", "new"), Tools([{"name": "f", "description": "new"}])])
    difference = compare(new, told(old))
    assert [segment.text for segment in difference.segments] == ["new"]
    assert [tool.description for tool in difference.tools] == ["new"]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), min_size=3, max_size=3), max_size=6
    )
)
def test_after_any_history_each_erratum_states_what_was_wrong(history: list[dict[str, str]]) -> None:
    """Told after every step, an erratum names exactly the fields whose value differs from the step before."""
    prompt = Prompt.of([Field(key, "x") for key in "abc"])
    ledger = told(prompt)
    before = dict.fromkeys("abc", "x")
    for values in history:
        prompt = prompt.with_texts(values)
        wrong = {key for key in values if values[key] != before[key]}
        assert {change.key for change in compare(prompt, ledger).changes} == wrong
        ledger = told(prompt, ledger)
        assert not compare(prompt, ledger)
        before = values


def test_unchanged_prompt_costs_its_user_message_only() -> None:
    """The ids grow by the answer, the user's text and what the template writes around them."""
    backend = ScriptedBackend(["OK"])
    with desk(backend, Order()) as ctx:
        ctx.ask("one")
        ctx.ask("two")
    grown = len(backend.requests[1].ids) - len(backend.requests[0].ids)
    frame = ["OK", "|", "\n", "|user\ntwo", "|", "\n", "|assistant\n"]
    assert grown == sum(map(len, frame))
    assert new_text(backend) == "OK\nuser\ntwo\nassistant\n"


def test_an_object_that_changes_and_comes_back_between_turns_says_nothing() -> None:
    """A bound object is read when a turn begins, not when it is set."""
    backend, order = ScriptedBackend(), Order()
    with desk(backend, order) as ctx:
        ctx.ask("one")
        order.status = "lost"
        order.status = "in transit"
        ctx.ask("two")
        assert not errata(ctx.ledger)
        order.status = "lost"
        ctx.ask("three")
        order.status = "in transit"
        ctx.ask("four")
    assert [entry.text for entry in errata(ctx.ledger)] == [
        "Update 1: the Order status is no longer in transit. The Order status is now lost.",
        "Update 2: the Order status is no longer lost. The Order status is now in transit.",
    ]
