"""Where chunks with an artifact stand in a prompt, and what a turn plans of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from agentkv import Document, Field, Ledger, Policy, Prompt, Skill, UserMessage, begin, finish
from agentkv.backends.base import Completion, FinishReason, RefusedSplice, SpliceSpec, Usage
from agentkv.costs import Costs
from agentkv.entries import RebaseReason
from agentkv.errors import ConfigurationError, SegmentError
from agentkv.kv.refusals import Refusal
from agentkv.plan import AppendSegment, Mode, Prime, Rebase, Splice
from agentkv.salts import Namespace
from agentkv.segments import Inline, Splicing
from agentkv.splicing import EDGE, Shelf, check_seam, merged, occurrences
from agentkv.testing import ScriptedBackend
from agentkv.tokens import TokenIds
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn

TEXT = "Parcels can be returned within thirty days of delivery. " * 8
OTHER = "Refunds are paid to the card that was used for the order. " * 6
SKILL, OTHER_SKILL = Skill("returns", TEXT), Skill("refunds", OTHER)
NAMES = {TEXT.strip(): "a" * 64, OTHER.strip(): "b" * 64}
QUESTION = [UserMessage("May I return it?")]


def find(ids: Sequence[int], wanted: Splicing = Splicing.AUTO) -> str | None:
    return NAMES.get(bytes(ids).decode())


def shelf(seam: int = 16, splicing: Splicing = Splicing.AUTO) -> Shelf:
    return Shelf(find, seam, splicing)


def traits(block: int = 1) -> ModelTraits:
    backend = ScriptedBackend()
    return ModelTraits(
        backend.tokenizer,
        replace(backend.capabilities, block_size=block, splices=True, context_window=100_000),
    )


def started(
    prompt: Prompt,
    ledger: Ledger | None = None,
    *,
    on: Shelf | None = None,
    block: int = 1,
    costs: Costs | None = None,
    mode: Mode = Mode.ON,
) -> PendingTurn:
    return begin(
        prompt, QUESTION, ledger or Ledger(), traits(block), costs or Costs(), shelf=on or shelf(), mode=mode
    )


def answered(pending: PendingTurn, refused: tuple[RefusedSplice, ...] = ()) -> Completion:
    ids = (*b"Yes.", 257)
    usage = Usage(len(pending.ids), 0, len(pending.ids), generated_tokens=len(ids))
    return Completion("Yes.", ids, FinishReason.STOP, usage, 0.1, 0.2, refused=refused)


def text_at(pending: PendingTurn, splice: SpliceSpec) -> str:
    return pending.encoder.tokenizer.decode(pending.ids.tolist(splice.start, splice.stop))


def test_a_skill_in_the_first_prompt_is_primed_and_spliced() -> None:
    """The plan names both steps; the splice begins behind the seam and covers the text's end."""
    pending = started(Prompt.of([Policy("Be brief."), SKILL]))
    (placed,) = pending.layout.placed
    assert placed.key == "skill:returns"
    assert text_at(pending, placed.splice) == TEXT.strip()[16:]
    assert placed.splice.offset == 16
    assert pending.plan == (
        Rebase(RebaseReason.FIRST),
        Prime(placed.splice.start),
        Splice("skill:returns", placed.splice.start, placed.splice.stop, "a" * 64),
    )
    assert pending.predicted_spliced_tokens == len(TEXT.strip()) - 16


@pytest.mark.parametrize("block", [16, 32, 128])
def test_a_splice_begins_at_a_block_boundary(block: int) -> None:
    """The seam runs on to the next boundary, and the artifact's offset follows."""
    pending = started(Prompt.of([Policy("Be brief."), SKILL]), block=block)
    (placed,) = pending.layout.placed
    assert placed.splice.start % block == 0
    assert 16 <= placed.splice.offset < 16 + block
    assert text_at(pending, placed.splice) == TEXT.strip()[placed.splice.offset :]


def test_a_skill_added_later_is_spliced_at_the_tail_in_the_same_namespace() -> None:
    """The epoch's namespace is fixed by its first request, so that the salt stays."""
    first = started(Prompt.of([Policy("Be brief.")]))
    assert first.frozen.namespace is Namespace.APPROXIMATE
    ledger, _ = finish(first, answered(first))
    added = started(Prompt.of([Policy("Be brief."), SKILL]), ledger)
    kinds = [type(step) for step in added.plan]
    assert kinds == [AppendSegment, Prime, Splice]
    assert added.frozen is first.frozen
    assert added.layout.placed[0].splice.start >= added.predicted_cached_tokens


def test_a_skill_that_the_cache_holds_is_not_planned_and_still_named_to_the_backend() -> None:
    """What was evicted meanwhile can then be spliced again."""
    prompt = Prompt.of([Policy("Be brief."), SKILL])
    first = started(prompt)
    ledger, _ = finish(first, answered(first))
    second = started(prompt, ledger)
    assert second.plan == ()
    assert second.predicted_spliced_tokens == 0
    assert second.layout.placed == first.layout.placed


def test_the_last_incomplete_block_of_a_cached_chunk_is_not_loaded_again() -> None:
    """Its whole blocks are cached, and the few tokens behind them are computed with all that follows."""
    prompt = Prompt.of([Policy("Be brief."), SKILL])
    first = started(prompt, block=32)
    ledger, _ = finish(first, answered(first))
    second = started(prompt, ledger, block=32)
    assert second.plan == ()
    assert all(item.splice.stop % 32 == 0 for item in second.layout.placed)


def test_separated_skills_are_each_primed() -> None:
    """Two runs, two primes, in the order of the prompt."""
    pending = started(Prompt.of([Policy("Be brief."), SKILL, OTHER_SKILL]))
    steps = [step for step in pending.plan if not isinstance(step, Rebase)]
    assert [type(step) for step in steps] == [Prime, Splice, Prime, Splice]
    for one, other in pairwise(item.splice for item in pending.layout.placed):
        assert one.stop <= other.start


def test_a_document_is_spliced_by_its_content() -> None:
    """Whatever it is called and whatever encloses it."""
    pending = started(Prompt.of([Policy("Be brief."), Document("found.md", TEXT)]))
    assert [item.key for item in pending.layout.placed] == ["document:found.md"]


def test_a_text_with_fields_is_spliced_while_its_values_are_those_compiled() -> None:
    """The tokens decide: another value is another text, of which there is no artifact."""
    shown = Inline(TEXT.replace("thirty days", "{limit}", 1))
    prompt = Prompt.of([Skill("returns", shown), Field("limit", "thirty days")])
    assert started(prompt).layout.placed
    assert not started(prompt.with_texts({"limit": "7 days"})).layout.placed


def test_never_computes_it() -> None:
    """A segment or a whole conversation may be kept exact."""
    never = Prompt.of([Policy("Be brief."), replace(SKILL, splice="never")])
    assert started(never).layout.placed == ()
    kept = started(Prompt.of([SKILL]), on=shelf(splicing=Splicing.NEVER))
    assert kept.layout.placed == ()
    assert kept.frozen.namespace is Namespace.EXACT


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_other_modes_splice_nothing(mode: Mode) -> None:
    """The kill switch keeps everything exact."""
    pending = started(Prompt.of([SKILL]), mode=mode)
    assert pending.layout.placed == ()
    assert pending.frozen.namespace is Namespace.EXACT


def test_a_splice_that_costs_more_than_computing_is_left_unless_it_is_always_wanted() -> None:
    """The measured costs decide for ``auto`` only."""
    dear = Costs(prefill_s=0.001, splice_s=0.002)
    assert started(Prompt.of([SKILL]), costs=dear).layout.placed == ()
    always = Prompt.of([replace(SKILL, splice=Splicing.ALWAYS)])
    assert len(started(always, costs=dear).layout.placed) == 1


def test_costs_of_splicing_are_what_loading_took() -> None:
    """The time to the first token less what the computed tokens cost."""
    full = Completion("", (), FinishReason.STOP, Usage(1000, 0, 1000), 2.0, 2.0)
    spliced = Completion("", (), FinishReason.STOP, Usage(1100, 0, 100, 1000), 0.3, 0.3)
    costs = Costs().observe(full).observe(spliced)
    assert costs.prefill_s == pytest.approx(0.002)
    assert costs.splice_s == pytest.approx(0.0001)
    assert costs.splice_pays(1000)
    assert not Costs(prefill_s=0.001, splice_s=0.002).splice_pays(1000)


def test_what_has_no_artifact_is_said_where_it_is_told() -> None:
    """Once, in the turn whose prompt brings it."""
    prompt = Prompt.of([Policy("Be brief."), Skill("unknown", TEXT.upper())])
    first = started(prompt)
    ledger, report = finish(first, answered(first))
    assert report.refused == (("skill:unknown", Refusal.MISSING),)
    assert "skill:unknown (no such artifact)" in str(report)
    later = started(prompt, ledger)
    assert finish(later, answered(later))[1].refused == ()


def test_what_the_backend_computed_instead_is_reported_by_segment() -> None:
    """With the reason that the backend gave."""
    pending = started(Prompt.of([Policy("Be brief."), SKILL]))
    refused = (RefusedSplice(pending.layout.placed[0].splice, Refusal.DAMAGED),)
    _, report = finish(pending, answered(pending, refused))
    assert report.refused == (("skill:returns", Refusal.DAMAGED),)
    assert report.predicted_spliced_tokens == pending.predicted_spliced_tokens


def test_edges_that_merge_with_their_surroundings_are_computed() -> None:
    """Up to EDGE other tokens at either end; more of them, and it is another text (K30)."""
    chunk = list(range(100, 160))
    words = TokenIds([1, 2, *chunk[EDGE:-2], 7, 8]).tobytes()
    (found,) = occurrences(words, chunk)
    assert found == (2 - EDGE, 2 + len(chunk) - EDGE - 2)
    cut = TokenIds([1, *chunk[EDGE + 1 : -2], 7]).tobytes()
    assert list(occurrences(cut, chunk)) == []


@pytest.mark.parametrize(("head", "computed"), [((1, 2, 3, 4), 0), ((9, 2, 3, 4), 1), ((1, 2, 9, 4), 3)])
def test_leading_tokens_that_merged_are_computed_without_a_seam_too(
    head: tuple[int, ...], computed: int
) -> None:
    """Up to the last that differs: a splice never claims tokens that are not the artifact's."""
    assert merged(TokenIds([7, *head, 5, 6]), 1, [1, 2, 3, 4, 5, 6]) == computed


def test_a_chunk_is_found_at_whole_tokens_only() -> None:
    """Bytes that look like it across two tokens are none of it."""
    chunk = [0x01010101] * (12 + 2 * EDGE)
    shifted = TokenIds([0x01010102, *[0x01010101] * 11, 0x02010101]).tobytes()
    assert list(occurrences(shifted, chunk)) == []
    assert len(list(occurrences(TokenIds([5, *chunk, 5, *chunk]).tobytes(), chunk))) == 2


def test_a_splice_policy_that_is_none_is_refused() -> None:
    """With the names of those that there are."""
    with pytest.raises(SegmentError, match="auto, never, always"):
        Skill("returns", TEXT, splice="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("seam", [-1, True, 1.5])
def test_a_seam_is_a_number_of_tokens(seam: object) -> None:
    """Anything else is refused by name and value."""
    with pytest.raises(ConfigurationError, match="seam="):
        check_seam(seam)  # type: ignore[arg-type]
