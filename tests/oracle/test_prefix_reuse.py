"""Reused KV against the same tokens computed fresh: same logits, same tokens, honest counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.backends import (
    Completion,
    Request,
    SamplingOptions,
    TransformersBackend,
    complete,
)
from agentkv.tokens import TokenIds
from tests.tiny_models import CUT_ANYWHERE, WHOLE_ONLY, WINDOW, ByteTokenizer, tiny_model

ANSWER = 6
"""Tokens generated in each call."""


class Recorder:
    """Notes what enters the model and the logits that leave it."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self.logits: list[torch.Tensor] = []
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.tokens += kwargs["input_ids"].shape[1]
        self.logits.append(output.logits[0, -1])


def backend_for(model: Any, **options: Any) -> tuple[TransformersBackend, Recorder]:
    """A backend whose answers end only by length, so that each call computes the same number of passes."""
    model.generation_config.eos_token_id = None
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()
    return TransformersBackend(model, tokenizer, **options), Recorder(model)


def call(backend: TransformersBackend, conversation: str, ids: list[int], salt: str = "salt") -> Completion:
    return complete(backend, Request(TokenIds(ids), conversation, salt, SamplingOptions(max_tokens=ANSWER)))


def fresh(model: Any, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """The oracle: the whole sequence through the model again for every token, with no cache."""
    ids = list(ids)
    logits = []
    for _ in range(ANSWER):
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits.append(last)
        ids.append(int(last.argmax()))
    return ids[-ANSWER:], torch.stack(logits)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def story(turn: Callable[[str, list[int]], Completion]) -> None:
    """A growing, a diverging, a shared, a shrinking and a repeated prompt, across three conversations."""
    prompt = tokens(40, seed=1)
    answer = turn("a", prompt)
    prompt += [*(answer.ids or ()), *tokens(9, seed=2)]
    turn("a", prompt)
    turn("b", prompt[:30] + tokens(13, seed=3))
    turn("a", prompt[:25] + tokens(30, seed=4))
    turn("b", prompt[:12])
    turn("b", prompt[:12])
    turn("c", tokens(3, seed=5))
    turn("c", prompt)


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("name", CUT_ANYWHERE + WHOLE_ONLY)
def test_reuse_gives_the_logits_and_tokens_of_a_fresh_computation(name: str, chunk: int) -> None:
    """At every step of every call; prompts are longer than the sliding window."""
    model = tiny_model(name)
    backend, recorder = backend_for(model, prefill_chunk=chunk)

    def turn(conversation: str, ids: list[int]) -> Completion:
        recorder.logits.clear()
        answer = call(backend, conversation, ids)
        got = torch.stack(recorder.logits[-ANSWER:])
        expected_ids, expected = fresh(model, ids)
        assert list(answer.ids or ()) == expected_ids
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        return answer

    assert WINDOW < 40
    story(turn)


@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_the_longest_prefix_is_reused_to_the_token(name: str) -> None:
    """Growing, diverging and shared prompts reuse exactly what was computed of them, and no more."""
    backend, _ = backend_for(tiny_model(name))
    prompt = tokens(40, seed=1)
    first = call(backend, "a", prompt)
    assert first.usage.cached_tokens == 0
    grown = [*prompt, *(first.ids or ()), *tokens(9, seed=2)]
    # The last generated token was never passed through the model.
    assert call(backend, "a", grown).usage.cached_tokens == 40 + ANSWER - 1
    assert call(backend, "b", grown[:30] + [255 - grown[30]] * 5).usage.cached_tokens == 30
    assert call(backend, "a", grown[:25] + [255 - grown[25]] * 5).usage.cached_tokens == 25
    assert call(backend, "a", grown[:12]).usage.cached_tokens == 11


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_a_state_that_cannot_be_cut_is_reused_only_as_a_whole(name: str) -> None:
    """A prompt that continues all of it reuses it; any other one is computed again."""
    backend, _ = backend_for(tiny_model(name))
    prompt = tokens(40, seed=1)
    first = call(backend, "a", prompt)
    grown = [*prompt, *(first.ids or ()), *tokens(9, seed=2)]
    assert call(backend, "b", grown).usage.cached_tokens == 40 + ANSWER - 1
    assert call(backend, "b", grown[:50]).usage.cached_tokens == 40 + ANSWER - 1
    assert call(backend, "b", grown[:45]).usage.cached_tokens == 0


@pytest.mark.parametrize("name", CUT_ANYWHERE + WHOLE_ONLY)
def test_counts_are_what_entered_the_model(name: str) -> None:
    """Computed prompt tokens and decoded ones add up to what a hook on the model saw."""
    backend, recorder = backend_for(tiny_model(name))

    def turn(conversation: str, ids: list[int]) -> Completion:
        recorder.tokens = 0
        answer = call(backend, conversation, ids)
        assert recorder.tokens == answer.usage.computed_tokens + ANSWER - 1
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.cached_tokens + answer.usage.computed_tokens == len(ids)
        return answer

    story(turn)


def test_kv_of_another_salt_is_never_reused() -> None:
    """Neither from the same conversation nor from another one."""
    backend, _ = backend_for(tiny_model("llama"))
    prompt = tokens(40, seed=1)
    call(backend, "a", prompt, salt="exact")
    assert call(backend, "a", prompt, salt="approximate").usage.cached_tokens == 0
    assert call(backend, "b", prompt, salt="third").usage.cached_tokens == 0
    assert call(backend, "a", prompt, salt="exact").usage.cached_tokens == 39


def test_kv_is_not_kept_where_the_rope_depends_on_the_length() -> None:
    """Past the original window each token's KV changes with the length: nothing is reused, all is right."""
    model = tiny_model("llama_dynamic_rope")
    backend, recorder = backend_for(model, prefill_chunk=7)
    short, long = tokens(20, seed=1), tokens(60, seed=2)
    call(backend, "a", short)
    assert call(backend, "a", short).usage.cached_tokens == 19
    call(backend, "b", long)
    recorder.logits.clear()
    again = call(backend, "b", long)
    assert again.usage.cached_tokens == 0
    expected = fresh(model, long)[1][0]
    torch.testing.assert_close(recorder.logits[0], expected, rtol=1e-4, atol=1e-4)


def test_a_stream_interrupted_by_another_goes_on_unharmed() -> None:
    """Two open streams take turns on one model, one of them on the other's prefix."""
    model = tiny_model("llama")
    backend, _ = backend_for(model)
    prompt, other = tokens(40, seed=1), tokens(40, seed=1)[:30] + tokens(9, seed=7)
    options = SamplingOptions(max_tokens=ANSWER)
    first = backend.stream(Request(TokenIds(prompt), "a", "salt", options))
    next(first)
    second = backend.stream(Request(TokenIds(other), "b", "salt", options))
    events = [event for pair in zip(first, second, strict=False) for event in pair]
    answers = [event for event in [*events, *first, *second] if isinstance(event, Completion)]
    by_cache = sorted(answers, key=lambda answer: answer.usage.cached_tokens)
    assert [answer.usage.cached_tokens for answer in by_cache] == [0, 30]
    assert [list(answer.ids or ()) for answer in by_cache] == [
        fresh(model, prompt)[0],
        fresh(model, other)[0],
    ]


def test_the_small_model_answers_alike_with_and_without_reuse(small_model_dir: Path) -> None:
    """A real model in float32: the turn on a hot cache gives the tokens of a cold one."""
    backend = TransformersBackend.from_pretrained(small_model_dir, dtype=torch.float32, prefill_chunk=64)
    tokenizer = backend.tokenizer
    options = SamplingOptions(max_tokens=12)
    prompt = tokenizer.render(
        [
            {"role": "system", "content": "You answer shortly. " + "The shop opens at nine. " * 20},
            {"role": "user", "content": "When does the shop open?"},
        ],
        add_generation_prompt=True,
    )
    first = complete(backend, Request(TokenIds(tokenizer.encode(prompt)), "a", "s", options))
    told = "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = TokenIds(tokenizer.encode(prompt)).extend(first.ids or ()).extend(tokenizer.encode(told))
    hot = complete(backend, Request(ids, "a", "s", options))
    cold = complete(backend, Request(ids, "a", "other salt", options))
    assert hot.usage.cached_tokens == first.usage.prompt_tokens + first.usage.generated_tokens - 1
    assert cold.usage.cached_tokens == 0
    assert hot.ids == cold.ids
    assert "Paris" in hot.text
