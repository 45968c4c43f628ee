"""Tokens from logits, and text from tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkv.backends import SamplingOptions
from agentkv.backends.detokenize import Detokenizer, StopScanner
from agentkv.backends.sampling import Sampler
from agentkv.errors import BackendError
from tests.tiny_models import ByteTokenizer


def draws(logits: list[float], prompt: list[int] | None = None, **options: Any) -> list[int]:
    """Two hundred first tokens, each of a sampler of its own."""
    scores = torch.tensor(logits)
    return [
        Sampler(SamplingOptions(seed=seed, **options), prompt or [], scores.device).sample(scores)
        for seed in range(200)
    ]


def test_top_k_keeps_the_most_likely_tokens() -> None:
    """And draws from all of those."""
    assert set(draws([1.0, 3.0, 2.9, 0.5], temperature=1.0, top_k=2)) == {1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities 0.5, 0.3, 0.2: two of them reach 0.6, one reaches 0.5."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    assert set(draws(logits, temperature=1.0, top_p=0.6)) == {1, 2}
    assert set(draws(logits, temperature=1.0, top_p=0.4)) == {1}
    assert set(draws(logits, temperature=1.0)) == {0, 1, 2}


def test_temperature_sharpens_the_distribution() -> None:
    """A low one draws the best token alone, a high one all."""
    assert set(draws([1.0, 2.0, 1.5], temperature=0.01)) == {1}
    assert set(draws([1.0, 2.0, 1.5], temperature=5.0)) == {0, 1, 2}


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    """A positive logit is divided by it and a negative one multiplied."""
    scores = torch.tensor([2.0, 1.9, 1.8])
    sampler = Sampler(SamplingOptions(repetition_penalty=1.2), [0], scores.device)
    assert [sampler.sample(scores) for _ in range(3)] == [1, 2, 0]
    assert torch.equal(scores, torch.tensor([2.0, 1.9, 1.8]))
    negative = torch.tensor([-1.0, -1.1])
    assert Sampler(SamplingOptions(repetition_penalty=1.2), [0], scores.device).sample(negative) == 1


def test_logits_that_are_not_finite_are_an_error() -> None:
    """Rather than a token chosen from nothing."""
    scores = torch.tensor([1.0, float("nan")])
    with pytest.raises(BackendError, match="not finite"):
        Sampler(SamplingOptions(), [], scores.device).sample(scores)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_detokenising_piece_by_piece_loses_no_text(data: bytes, end: int) -> None:
    """For any bytes, valid UTF-8 or not, the pieces make the whole."""
    ids = list(data[:end])
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == ByteTokenizer().decode(ids)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Any cutting gives the text before the stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    scanner = StopScanner(stops)
    passed = ""
    while text:
        cut = data.draw(st.integers(1, len(text)))
        passed += scanner.push(text[:cut])
        text = text[cut:]
    assert passed + scanner.flush() == expected
    assert scanner.stopped == bool(ends)
