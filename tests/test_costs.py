"""Costs are measured, never assumed."""

from __future__ import annotations

import pytest

from agentkv.backends.base import Completion, FinishReason, Usage
from agentkv.costs import Costs


def completion(prompt: int, computed: int, generated: int, ttft: float, per_token: float) -> Completion:
    """Make a completion that took `per_token` seconds for each token behind the first."""
    return Completion(
        text="",
        ids=None,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt, prompt - computed, computed, generated_tokens=generated),
        ttft_s=ttft,
        duration_s=ttft + per_token * (generated - 1),
    )


def measured(standing_s: float) -> Costs:
    """Return costs over ten calls in which each token of context adds `standing_s` to a decoded one."""
    costs = Costs(turns_ahead=10)
    for n in range(10):
        prompt = 1000 + 500 * n
        costs = costs.observe(completion(prompt, 500, 11, 0.5, 0.01 + standing_s * (prompt + 5)))
    return costs


def test_nothing_pays_before_it_was_measured() -> None:
    """Without measurements there is no estimate and no rebase for its cost."""
    assert Costs().standing_s is None
    assert not Costs().rebase_pays(10**9, 1)


def test_slope_and_prefill_are_found() -> None:
    """Seconds per prefilled and per standing token are those that the calls took."""
    costs = measured(1e-6)
    assert costs.prefill_s == pytest.approx(0.001)
    assert costs.standing_s == pytest.approx(1e-6, rel=1e-3)
    assert costs.answer_tokens == pytest.approx(11)


def test_rebase_pays_when_errata_cost_more_than_it() -> None:
    """Standing tokens times slope, answer and turns against rebased tokens times prefill."""
    costs = measured(1e-6)
    even = 1000 * 0.001 / (1e-6 * 11 * 10)
    assert costs.rebase_pays(int(even * 1.1), 1000)
    assert not costs.rebase_pays(int(even * 0.9), 1000)


def test_small_prefills_are_not_counted() -> None:
    """A call that prefilled little says more of latency than of prefill."""
    assert Costs().observe(completion(100, 63, 2, 1.0, 0.1)).prefill_s is None


def test_noise_never_makes_context_free_to_shorten() -> None:
    """A slope below zero counts as zero."""
    assert measured(-1e-9).standing_s == 0.0


def test_answers_of_one_token_say_nothing_of_decoding() -> None:
    """No time lies between tokens if there is only one."""
    assert Costs().observe(completion(100, 100, 1, 1.0, 0.1)).calls == 0


def test_a_busy_server_does_not_make_errata_look_dear() -> None:
    """Decode times that others' calls double and halve say nothing of the context's length."""
    costs = Costs()
    for n, per_token in enumerate([0.1, 0.5, 0.2, 0.9, 0.15, 0.6, 0.8, 0.3, 0.7, 0.9, 0.4, 0.95]):
        costs = costs.observe(completion(4000 + 30 * n, 70, 16, 0.6, per_token))
    assert costs.standing_s == 0.0
    assert not costs.rebase_pays(400, 4300)


def test_a_load_that_grows_with_the_conversation_is_not_taken_for_its_length() -> None:
    """However steady the rise: reading a token's KV never costs more than a part of computing it."""
    costs = Costs()
    for n in range(12):
        costs = costs.observe(completion(4000 + 30 * n, 70, 16, 0.3, 0.1 + 0.05 * n))
    assert costs.prefill_s is not None
    assert costs.standing_s == pytest.approx(costs.prefill_s / 100)
    assert not costs.rebase_pays(400, 4300)
