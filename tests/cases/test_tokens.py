"""Token ids: what was generated is not tokenised again, and whole blocks are what a cache hits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from agentkv import AgentKVContext, Field, Policy
from agentkv.backends.base import Completion, Event, Request
from agentkv.miss import Miss
from agentkv.template import BreakPlace, TemplateEncoder, prefix_violation
from agentkv.testing import Scripted, ScriptedBackend
from agentkv.turn import predict_cached
from tests.cases.prompts import begins_with
from tests.templates import load

RULES = Policy("Refund within thirty days.")


def in_bytes(name: str, text: str) -> tuple[int, ...]:
    """Encode a text as a model may generate it: token by token, none of which was merged."""
    return tuple(token for letter in text for token in load(name).encode(letter))


TEXT = "The status is no longer in transit."


def test_ids_that_the_engine_made_are_what_the_next_prompt_goes_on_from() -> None:
    """Though their text has other, shorter ids; the prediction holds (K29)."""
    odd = in_bytes("qwen", TEXT)
    assert load("qwen").decode(odd) == TEXT
    assert len(load("qwen").encode(TEXT)) < len(odd)
    backend = ScriptedBackend([Scripted(ids=odd), "Two."], tokenizer=load("qwen"))
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as context:
        context.ask("One")
        context.set("f", "b")
        report = context.ask("Two").report
    first, second = backend.requests
    assert tuple(second.ids.tolist(len(first.ids), len(first.ids) + len(odd))) == odd
    assert report.cached_tokens == report.predicted_cached_tokens == len(first.ids) + len(odd)
    assert report.miss is None


class WithoutIds(ScriptedBackend):
    """A server that returns text only."""

    def stream(self, request: Request) -> Iterator[Event]:
        for event in super().stream(request):
            yield replace(event, ids=None) if isinstance(event, Completion) else replace(event, ids=())


def test_drift_that_cannot_be_seen_beforehand_is_reported_as_a_miss() -> None:
    """Where the server gives no ids, a text that tokenises otherwise hits less than predicted (K29)."""
    odd = in_bytes("qwen", TEXT)
    backend = WithoutIds([Scripted(ids=odd), "Two."], tokenizer=load("qwen"))
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("One")
        report = context.ask("Two").report
    assert report.cached_tokens < report.predicted_cached_tokens
    assert report.miss is Miss.LOST
    assert context.report.mispredicted == 1


def test_drift_of_a_prompt_that_is_rendered_anew_is_found_at_its_index() -> None:
    """The checker names the id, and that it lies in the answer (K29)."""
    encoder = TemplateEncoder(load("qwen"))
    user, more = {"role": "user", "content": "One"}, {"role": "user", "content": "Two"}
    odd = in_bytes("qwen", TEXT)
    prompt = encoder.opening([user])
    whole = encoder.render_all([user, {"role": "assistant", "content": TEXT}, more])
    found = prefix_violation(prompt, odd, whole)
    assert found is not None
    assert found.where is BreakPlace.GENERATED
    assert len(prompt) <= found.index < len(prompt) + len(odd)
    assert prefix_violation(prompt, odd, [*prompt, *odd, *encoder.extension(odd, [more])]) is None


def test_drift_on_a_template_that_is_rendered_anew_is_never_counted_as_a_hit() -> None:
    """The prediction ends at the first id that differs, and the template is named (K29)."""
    odd = in_bytes("mistral", TEXT)
    backend = ScriptedBackend([Scripted(ids=odd), "Two."], tokenizer=load("mistral"))
    with AgentKVContext(backend) as context:
        context.ask("One")
        before = context.ledger.ids
        report = context.ask("Two").report
    assert before is not None
    assert report.predicted_cached_tokens == report.cached_tokens < len(before) - 1
    assert report.miss is Miss.TEMPLATE


EDGES = (" ", "\n", "a")
# Templates whose messages lie between control tokens: two byte-level BPEs, two that mark spaces.
BOUNDED = ("chatml", "qwen", "gemma", "phi")


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(("end", "start"), list(product(EDGES, EDGES)))
def test_what_is_appended_has_the_ids_that_it_has_in_the_whole(name: str, end: str, start: str) -> None:
    """Text ending and beginning in a space, a line break or a letter: edges lie on control tokens (K30)."""
    encoder = TemplateEncoder(load(name))
    first = {"role": "user", "content": f"Where is it?{end}"}
    answer = {"role": "assistant", "content": f"On its way{end}"}
    more = {"role": "user", "content": f"{start}lready?{end}"}
    opening, extension = encoder.opening([first]), encoder.extension([], [more])
    whole = encoder.render_all([first, answer, more])
    assert whole[: len(opening)] == opening
    assert whole[-len(extension) :] == extension
    assert extension[0] in load(name).control_tokens.values()


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(("end", "start"), list(product(EDGES, EDGES)))
def test_errata_of_any_value_are_appended_without_touching_what_stands(
    name: str, end: str, start: str
) -> None:
    """Answers and values with any white space at their edges (K30)."""
    backend = ScriptedBackend([f"On its way{end}", "Yes."], tokenizer=load(name))
    with AgentKVContext(backend, [RULES, Field("f", "x")]) as context:
        context.ask(f"Where{end}")
        sent = context.ledger.ids
        context.set("f", f"{start}new{end}")
        context.ask(f"{start}nd now?")
    assert sent is not None
    assert begins_with(backend.requests[-1].ids, sent)


@pytest.mark.parametrize(
    ("common", "computed", "length", "block", "cached"),
    [
        (15, 100, 200, 16, 0),
        (16, 100, 200, 16, 16),
        (17, 100, 200, 16, 16),
        (240, 784, 1000, 16, 240),
        (240, 784, 1000, 784, 0),
        (784, 784, 1000, 784, 784),
        (64, 64, 64, 16, 48),
        (64, 64, 64, 1, 63),
        (256, 200 + 56 - 1, 300, 32, 224),
    ],
)
def test_only_whole_blocks_that_were_computed_hit(
    common: int, computed: int, length: int, block: int, cached: int
) -> None:
    """Never the last token, which is always computed, nor the last sampled one, which has no KV yet (K47)."""
    assert predict_cached(common, computed, length, block) == cached


@pytest.mark.parametrize("block", [1, 16, 32, 784])
def test_the_prediction_reads_the_block_size_of_the_backend(block: int) -> None:
    """And a prefix below one block is reported as short, not as broken (K47)."""
    backend = ScriptedBackend(["An answer of some length."], block_size=block)
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("One")
        computed = context.ledger.computed
        report = context.ask("Two").report
    assert report.cached_tokens == report.predicted_cached_tokens == computed // block * block
    assert report.miss is (Miss.SHORT if block == 784 else None)
