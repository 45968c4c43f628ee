"""Ledgers over any history of values: when one is stored, dropped, erased or left to grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import Costs, Field, Inline, Ledger, Policy, Profile, Prompt, Restate, UserMessage, begin, finish
from agentkv.backends import Capabilities, complete
from agentkv.backends.base import Request
from agentkv.entries import Erratum
from agentkv.testing import ScriptedBackend
from agentkv.tokens import TokenIds
from agentkv.traits import ModelTraits
from tests.properties import strategies as make

History: TypeAlias = Sequence[dict[str, Any]]
"""What is set before each turn."""
Run: TypeAlias = tuple[Ledger, list[TokenIds]]
"""What was recorded, and the prompts that were sent."""

FAMILIES = ("bytes", "qwen", "gemma", "mistral")
"""One of each kind: plain, with roles for all, with roles that alternate, and rendered anew each turn."""
KEYS = ("order.status", "order.note", "buyer.name", "buyer.tier")


@cache
def traits_of(name: str, profile: Profile) -> ModelTraits:
    return ModelTraits(make.tokenizer_of(name), Capabilities("scripted", 1_000_000, 1), profile)


def prompt_of(values: dict[str, Any]) -> Prompt:
    policy = Policy(Inline("You serve {buyer.name}, tier {buyer.tier}."))
    return Prompt.of([policy, *(Field(key, values[key], label=make.FIELDS[key]) for key in KEYS)])


def histories(name: str) -> st.SearchStrategy[History]:
    change = st.dictionaries(st.sampled_from(KEYS), make.values(name), max_size=3)
    return st.lists(change, min_size=1, max_size=6)


def run(
    name: str,
    history: History,
    profile: Profile,
    between: Callable[[Ledger], Ledger] = lambda ledger: ledger,
    drops: Sequence[History] = (),
) -> Run:
    """Hold a conversation; `between` is done after each turn, `drops` are turns begun and never finished."""
    backend = ScriptedBackend(["Well."], tokenizer=make.tokenizer_of(name))
    traits = traits_of(name, profile)
    values: dict[str, Any] = dict.fromkeys(KEYS, "in transit")
    ledger, sent = Ledger(), []
    for number, changes in enumerate(history):
        values |= changes
        for lost in drops[number] if number < len(drops) else ():
            begin(prompt_of(values | lost), [UserMessage("Lost.")], ledger, traits, Costs())
        pending = begin(prompt_of(values), [UserMessage("And now?")], ledger, traits, Costs())
        completion = complete(backend, Request(pending.ids, "one", "salt"))
        ledger, _ = finish(pending, completion)
        ledger = between(ledger)
        sent.append(pending.ids)
    return ledger, sent


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_storing_it_after_every_turn_changes_nothing(name: str, data: st.DataObject) -> None:
    """Read back from JSON each time, a conversation sends the same ids and records the same entries."""
    history, profile = data.draw(histories(name)), data.draw(make.profiles())
    ledger, sent = run(name, history, profile)
    stored, again = run(name, history, profile, between=lambda kept: Ledger.from_json(kept.to_json()))
    assert again == sent
    assert list(stored) == list(ledger)
    assert stored.state == ledger.state


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_turns_that_were_never_finished_leave_no_trace(name: str, data: st.DataObject) -> None:
    """Whatever they would have said, the turns that are finished send and record the same."""
    history, profile = data.draw(histories(name)), data.draw(make.profiles())
    drops = data.draw(st.lists(histories(name), max_size=4))
    ledger, sent = run(name, history, profile)
    disturbed, again = run(name, history, profile, drops=drops)
    assert again == sent
    assert list(disturbed) == list(ledger)


@given(
    every=st.integers(1, 5), numbers=st.lists(st.tuples(st.sampled_from(KEYS), st.integers()), max_size=20)
)
def test_no_statement_is_older_than_a_snapshot(every: int, numbers: list[tuple[str, int]]) -> None:
    """With every K-th erratum a snapshot, what was stated was stated among the last K."""
    profile = Profile(snapshot_every=every, restate=Restate.NEVER)
    history: list[dict[str, Any]] = [{}, *({key: value} for key, value in numbers)]
    for length in range(1, len(history) + 1, 3):
        ledger, _ = run("bytes", history[:length], profile)
        state = ledger.state
        assert all(state.revision - told.revision < every for told in state.fields.values() if told.standing)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_errata_of_an_epoch_are_counted_as_they_stand(name: str, data: st.DataObject) -> None:
    """Their number, their tokens and their revisions are those of the entries."""
    ledger, _ = run(name, data.draw(histories(name)), data.draw(make.profiles()))
    errata = [entry for entry in ledger.epoch_entries() if isinstance(entry, Erratum)]
    assert ledger.state.errata == len(errata)
    assert ledger.state.errata_tokens == sum(erratum.tokens for erratum in errata)
    assert all(erratum.tokens >= 1 for erratum in errata)
    revisions = [entry.revision for entry in ledger if isinstance(entry, Erratum)]
    assert revisions == list(range(1, len(revisions) + 1))


@pytest.mark.parametrize("key", ["order.note", "buyer.name"])
@given(data=st.data())
def test_an_erased_value_is_stored_nowhere(key: str, data: st.DataObject) -> None:
    """In whatever text it stood and whatever of it changed, its secret part is gone; the rest stays."""
    around = st.tuples(make.texts("qwen"), make.texts("qwen"), st.sampled_from(["", "long " * 500]))
    secret = st.integers(1000, 9999).flatmap(
        lambda number: around.map(lambda parts: f"{parts[2]}{parts[0]} zebra{number} {parts[1]}")
    )
    history = data.draw(
        st.lists(st.fixed_dictionaries({key: secret, "order.status": make.values("qwen")}), max_size=5)
    )
    ledger, _ = run("qwen", history, data.draw(make.profiles()))
    erased = ledger.erase(key)
    assert "zebra" in ledger.to_json() or not history
    assert "zebra" not in erased.to_json()
    assert len(erased) == len(ledger)
    assert Ledger.from_json(erased.to_json()).state.fields.keys() == ledger.state.fields.keys()
    assert list(erased.erase(key)) == list(erased)
