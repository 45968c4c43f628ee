"""`begin` and `finish` are pure: they change nothing, and the same arguments give the same turn."""

from __future__ import annotations

import pytest

from agentkv import Field, Ledger, Policy, Prompt, Skill, Tools, UserMessage, begin, finish
from agentkv.backends.base import Completion, FinishReason, Usage
from agentkv.costs import Costs
from agentkv.entries import Erratum, Frozen, Generated, Message, RebaseReason
from agentkv.errors import InputError, SegmentError, TruncationDetectedError
from agentkv.inputs import ToolResult
from agentkv.segments import Deletion, Inline
from agentkv.testing import ScriptedBackend
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn
from tests.desk import call, lookup

BACKEND = ScriptedBackend()
TRAITS = ModelTraits(BACKEND.tokenizer, BACKEND.capabilities)
PROMPT = Prompt.of([Policy("Be brief."), Field("x", 1)])


def started(prompt: Prompt = PROMPT, ledger: Ledger | None = None, text: str = "Hi") -> PendingTurn:
    """Begin a turn."""
    return begin(prompt, [UserMessage(text)], ledger or Ledger(), TRAITS, Costs())


def answered(pending: PendingTurn, text: str = "OK", *, ids: bool = True) -> Completion:
    """Answer it."""
    made = (*text.encode(), 257)
    return Completion(
        text=text,
        ids=made if ids else None,
        finish_reason=FinishReason.STOP,
        usage=Usage(len(pending.ids), 0, len(pending.ids), generated_tokens=len(made)),
        ttft_s=0.0,
        duration_s=0.0,
    )


def test_begin_changes_nothing_and_repeats_itself() -> None:
    """Begun twice from one ledger, a turn has the same ids and entries; the ledger stays."""
    ledger, _ = finish(started(), answered(started()))
    before = ledger.to_json()
    changed = PROMPT.with_texts({"x": "2"})
    one, two = started(changed, ledger), started(changed, ledger)
    assert one.ids == two.ids
    assert one.entries == two.entries
    assert ledger.to_json() == before


def test_turns_of_one_ledger_branch() -> None:
    """Two turns finished from one ledger do not see each other."""
    ledger, _ = finish(started(), answered(started()))
    left = started(ledger=ledger, text="left")
    right = started(PROMPT.with_texts({"x": "2"}), ledger, "right")
    one, _ = finish(left, answered(left))
    two, _ = finish(right, answered(right))
    assert one.state.revision == 0
    assert two.state.revision == 1
    assert "right" not in one.to_json()
    assert "left" not in two.to_json()


def test_entries_are_what_is_told_in_order() -> None:
    """Prefix and message first; later the erratum before the message; the answer last."""
    first = started()
    assert [type(entry) for entry in first.entries] == [Frozen, Message]
    ledger, _ = finish(first, answered(first))
    second = started(PROMPT.with_texts({"x": "2"}), ledger)
    assert [type(entry) for entry in second.entries] == [Erratum, Message]
    assert second.erratum == "Update 1: the X is no longer 1. The X is now 2."
    after, report = finish(second, answered(second))
    assert isinstance(list(after)[-1], Generated)
    assert (report.turn, report.epoch, report.revision) == (2, 1, 1)


def test_erratum_knows_its_size() -> None:
    """Its tokens are counted as the tokenizer makes them."""
    ledger, _ = finish(started(), answered(started()))
    pending = started(PROMPT.with_texts({"x": "2"}), ledger)
    (erratum,) = [entry for entry in pending.entries if isinstance(entry, Erratum)]
    assert erratum.tokens == len(erratum.text)


def test_prediction_is_what_was_sent_and_generated() -> None:
    """All but the last sampled token, whose KV does not exist yet."""
    first = started()
    assert first.predicted_cached_tokens == 0
    ledger, _ = finish(first, answered(first))
    second = started(ledger=ledger)
    assert second.common == len(first.ids) + 3
    assert second.predicted_cached_tokens == len(first.ids) + 2
    assert ledger.computed == len(first.ids) + 2


def test_answer_without_ids_is_known_by_its_text() -> None:
    """A server that gives no ids: the next prompt extends what its text encodes to."""
    first = started()
    ledger, _ = finish(first, answered(first, ids=False))
    second = started(ledger=ledger)
    assert ledger.ids is not None
    assert second.ids.common_prefix(ledger.ids) == len(ledger.ids)
    assert "OK" in BACKEND.tokenizer.decode(second.ids.tolist())


def test_stopped_answer_opens_no_round() -> None:
    """A call in an answer that was stopped is text."""
    prompt = Prompt.of([Tools([lookup])])
    pending = started(prompt)
    ledger, _ = finish(pending, answered(pending, call()), stopped=True)
    assert ledger.state.open_calls == ()
    ledger, _ = finish(pending, answered(pending, call()))
    assert [made.id for made in ledger.state.open_calls] == ["call00101"]


def test_truncation_is_detected() -> None:
    """Fewer tokens read than sent; more is fine, as a server may add some."""
    pending = started()
    for read in (len(pending.ids) - 1, 0):
        completion = Completion("OK", None, FinishReason.STOP, Usage(read, 0, read), 0.0, 0.0)
        with pytest.raises(TruncationDetectedError, match=f"read {read}"):
            finish(pending, completion)
    more = Completion("OK", None, FinishReason.STOP, Usage(len(pending.ids) + 1, 0, 1), 0.0, 0.0)
    assert finish(pending, more)[1].prompt_tokens == len(pending.ids) + 1


def test_inputs_and_prompt_are_checked_first() -> None:
    """A result of no call, and a segment that shows an undeclared field, raise before anything is planned."""
    with pytest.raises(InputError, match="open calls: none"):
        begin(PROMPT, [ToolResult("a", "b")], Ledger(), TRAITS, Costs())
    with pytest.raises(SegmentError, match="not declared"):
        started(Prompt.of([Skill("s", Inline("{y}"))]))


def test_hard_deletion_erases_within_the_turn() -> None:
    """Without a context, too: the pending turn continues a ledger that holds the value no more."""
    prompt = Prompt.of([Field("x", "secret"), Field("y", 1)])
    pending = started(prompt)
    ledger, _ = finish(pending, answered(pending, "It is secret."))
    erased = started(prompt.without("x", Deletion.HARD), ledger)
    after, _ = finish(erased, answered(erased))
    assert erased.frozen.reason is RebaseReason.ERASED
    assert erased.frozen.generation == 1
    assert "secret" not in after.to_json()
    assert "secret" not in BACKEND.tokenizer.decode(erased.ids.tolist())
    assert "secret" in ledger.to_json()


def test_template_is_measured_once_for_its_arguments() -> None:
    """Encoders are kept for each set of template arguments."""
    assert TRAITS.encoder({"a": 1}) is TRAITS.encoder({"a": 1})
    assert TRAITS.encoder({"a": 1}) is not TRAITS.encoder({"a": 2})
