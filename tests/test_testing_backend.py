"""The public fake behaves like a paged prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.backends.base import Backend, Completion, Delta, FinishReason, Request, SamplingOptions, complete
from agentkv.errors import BackendError, ContextWindowError
from agentkv.testing import ByteTokenizer, Scripted, ScriptedBackend
from agentkv.tokenizer import ChatTokenizer
from agentkv.tokens import TokenIds


def request(text: str, salt: str = "s", **options: int) -> Request:
    """Make a request of plain text."""
    return Request(TokenIds(ByteTokenizer().encode(text)), "c", salt, SamplingOptions(**options))  # type: ignore[arg-type]


def test_it_fits_the_protocols() -> None:
    """Backend and tokenizer are what contexts ask for."""
    assert isinstance(ScriptedBackend(), Backend)
    assert isinstance(ByteTokenizer(), ChatTokenizer)


def test_answers_come_in_order_and_the_last_is_repeated() -> None:
    """Strings, records and functions of the request."""
    backend = ScriptedBackend(["one", lambda asked: f"{len(asked.ids)}", Scripted("three")])
    assert [complete(backend, request("abcd")).text for _ in range(4)] == ["one", "4", "three", "three"]
    with pytest.raises(ValueError, match="at least one answer"):
        ScriptedBackend([])


@given(st.text(max_size=20))
def test_deltas_make_up_text_and_ids(text: str) -> None:
    """Deltas hold whole characters only, and together the completion's text and ids but its end."""
    *deltas, completion = ScriptedBackend([text]).stream(request("x"))
    assert isinstance(completion, Completion)
    assert "".join(d.text for d in deltas if isinstance(d, Delta)) == completion.text == text
    ids = tuple(i for d in deltas if isinstance(d, Delta) for i in d.ids)
    assert completion.ids == (*ids, 257)
    assert completion.usage.generated_tokens == len(ids) + 1


@given(st.text(max_size=20))
def test_tokenizer_round_trip(text: str) -> None:
    """Encoding and decoding give the text back."""
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text.replace("<|end|>", "").replace(
        "<|start|>", ""
    )


def test_control_tokens_have_ids_of_their_own() -> None:
    """Their text becomes one id each, anywhere in a text."""
    assert ByteTokenizer().encode("a<|end|>b<|start|><|") == [97, 257, 98, 256, 60, 124]


def test_cache_holds_whole_blocks_of_prompt_and_answer() -> None:
    """200 prompt and 56 generated tokens give 224 cached at a block of 32."""
    backend = ScriptedBackend(["y" * 55], block_size=32)
    first = complete(backend, request("x" * 200))
    assert (first.usage.cached_tokens, first.usage.generated_tokens) == (0, 56)
    longer = Request(TokenIds([*(120,) * 200, *(first.ids or ()), *b"more" * 20]), "c", "s")
    assert complete(backend, longer).usage.cached_tokens == 224


def test_salts_are_kept_apart_and_eviction_empties_the_cache() -> None:
    """Another salt finds nothing, the same one does until everything is evicted."""
    backend = ScriptedBackend()
    complete(backend, request("x" * 50))
    assert complete(backend, request("x" * 60, salt="other")).usage.cached_tokens == 0
    assert complete(backend, request("x" * 60)).usage.cached_tokens == 50
    backend.evict()
    assert complete(backend, request("x" * 60)).usage.cached_tokens == 0


def test_least_recent_sequence_is_evicted_beyond_the_capacity() -> None:
    """A cache of two sequences forgets the first of three."""
    backend = ScriptedBackend(capacity=2)
    for letter in "abc":
        complete(backend, request(letter * 50))
    assert [complete(backend, request(letter * 60)).usage.cached_tokens for letter in "ca"] == [50, 0]


def test_answer_stops_at_the_room() -> None:
    """`max_tokens` cuts it, without an end-of-turn token."""
    completion = complete(ScriptedBackend(["hello"]), request("x", max_tokens=3))
    assert (completion.text, completion.finish_reason) == ("hel", FinishReason.LENGTH)
    assert completion.ids == tuple(b"hel")


def test_window_is_enforced() -> None:
    """Prompt and room beyond the window are refused before anything is recorded."""
    backend = ScriptedBackend(context_window=100)
    with pytest.raises(ContextWindowError, match="exceed the window of 100"):
        backend.stream(request("x" * 90, max_tokens=11))
    assert not backend.requests


@pytest.mark.parametrize("after", [0, 2, 5, 99])
def test_scripted_error_is_raised_where_it_is_asked_for(after: int) -> None:
    """After so many deltas, or at the end of a shorter answer."""
    events = ScriptedBackend([Scripted("hello", error=BackendError("no"), fail_after=after)]).stream(
        request("x")
    )
    for _ in range(min(after, 5)):
        assert isinstance(next(events), Delta)
    with pytest.raises(BackendError, match="no"):
        next(events)


def test_answer_that_does_not_close_has_no_end_token() -> None:
    """As models do that are cut off."""
    assert complete(ScriptedBackend([Scripted("a", closes=False)]), request("x")).ids == (97,)


def test_stopped_answer_stays_cached_as_far_as_it_came() -> None:
    """A closed stream leaves its prompt's KV behind, as on a server."""
    backend = ScriptedBackend(["hello"])
    stream = backend.stream(request("x" * 50))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert complete(backend, request("x" * 50 + "hello")).usage.cached_tokens == 50
