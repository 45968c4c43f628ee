"""A span of KV: which tokens it holds, where, and of which heads."""

from __future__ import annotations

import pytest
import torch

from agentkv.errors import ConfigurationError
from agentkv.kv.rope import RopeSpec
from agentkv.kv.spans import KVSpan, LayerKV, head_range, join
from tests.kv.oracle import any_weights, computed, equal, spec_of
from tests.tiny_models import tiny_model

IDS = list(b"a chunk of it")


def _span(tokens: int = 6, position: int = 10, heads: int = 4, layers: int = 2) -> KVSpan:
    torch.manual_seed(tokens + position)
    made = [LayerKV(torch.randn(heads, tokens, 8), torch.randn(heads, tokens, 5)) for _ in range(layers)]
    return KVSpan(tuple(made), position)


def test_slice_has_the_tokens_and_their_position() -> None:
    """Tokens [2, 5) of a span at 10 stand at 12."""
    span = _span()
    part = span.slice(2, 5)
    assert (len(part), part.position) == (3, 12)
    assert torch.equal(part.layers[1].keys, span.layers[1].keys[:, 2:5])
    assert torch.equal(part.layers[1].values, span.layers[1].values[:, 2:5])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 7)])
def test_slice_beyond_the_span_is_refused(start: int, stop: int) -> None:
    """Nothing is cut short without a word."""
    with pytest.raises(ConfigurationError, match="not within a span of 6"):
        _span().slice(start, stop)


def test_a_part_that_is_moved_is_the_part_of_the_moved_whole() -> None:
    """The seam can be cut off before or after the move."""
    model = any_weights(tiny_model("llama_yarn"))
    span, spec = computed(model, IDS, 96), spec_of(model)
    assert equal(span.slice(4, 9).moved(34, spec), span.moved(30, spec).slice(4, 9))


def test_latent_attention_moves_the_tensor_that_holds_positions() -> None:
    """There the latents are cached as keys and stay; the rotary part is cached as values."""
    model = any_weights(tiny_model("deepseek_latent"))
    span = computed(model, IDS, 3)
    moved = span.moved(40, spec_of(model))
    assert torch.equal(moved.layers[2].keys, span.layers[2].keys)
    assert not torch.allclose(moved.layers[2].values, span.layers[2].values)


def test_moved_needs_the_positions_of_its_own_model() -> None:
    """A specification of other layers is another model's."""
    spec = spec_of(tiny_model("llama"))
    with pytest.raises(ConfigurationError, match="2 layers cannot be moved with the rotary positions of 4"):
        _span().moved(0, spec)


def test_a_span_cannot_be_moved_before_the_beginning() -> None:
    """Positions count from 0."""
    with pytest.raises(ConfigurationError, match="-1 is negative"):
        _span().moved(-1, RopeSpec(rotations=(), layers=(None, None)))


@pytest.mark.parametrize("of", [1, 2, 4])
def test_ranks_share_out_all_heads_in_order(of: int) -> None:
    """Put together, the ranks' heads are the whole."""
    span = _span()
    parts = [span.heads(rank, of) for rank in range(of)]
    assert torch.equal(torch.cat([part.layers[1].keys for part in parts]), span.layers[1].keys)
    assert torch.equal(torch.cat([part.layers[1].values for part in parts]), span.layers[1].values)
    assert {part.position for part in parts} == {10}


def test_more_ranks_than_heads_hold_the_same_head_side_by_side() -> None:
    """2 heads over 8 ranks: ranks 0 to 3 hold the first."""
    assert [head_range(2, rank, 8) for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4


@pytest.mark.parametrize(("rank", "of"), [(-1, 2), (2, 2), (0, 0), (0, 3), (0, 6)])
def test_ranks_that_cannot_be_are_refused(rank: int, of: int) -> None:
    """No such rank, or heads that cannot be shared out evenly."""
    with pytest.raises(ConfigurationError, match="rank"):
        _span().heads(rank, of)


def test_join_puts_what_was_cut_together() -> None:
    """Cut and joined is the whole."""
    span = _span()
    joined = join([span.slice(0, 1), span.slice(1, 4), span.slice(4, 6)])
    assert joined.position == span.position
    assert equal(joined, span)


def test_join_of_a_gap_is_refused() -> None:
    """A token too few between two spans would shift all that follow."""
    span = _span()
    with pytest.raises(ConfigurationError, match="position 13 does not follow one that ends at 12"):
        join([span.slice(0, 2), span.slice(3, 6)])


def test_join_needs_spans_of_one_model() -> None:
    """None, or spans of other layers."""
    with pytest.raises(ConfigurationError, match="no spans"):
        join([])
    with pytest.raises(ConfigurationError, match="2 and 3 layers"):
        join([_span(), _span(position=16, layers=3)])


def test_size_is_that_of_all_tensors() -> None:
    """6 tokens, 4 heads, 8 + 5 numbers of 4 bytes, 2 layers."""
    assert _span().nbytes == 6 * 4 * 13 * 4 * 2
    assert _span().to(torch.bfloat16).nbytes == 6 * 4 * 13 * 2 * 2


def test_conversion_keeps_position_and_copies_nothing_needlessly() -> None:
    """To the same dtype and device, the tensors are the same."""
    span = _span()
    assert span.to(torch.float16, "cpu").position == 10
    assert span.to(torch.float16).layers[0].values.dtype == torch.float16
    assert span.to(torch.float32, "cpu").layers[0].keys is span.layers[0].keys


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, 3, 4), (2, 4, 4)), ((2, 3, 4), (1, 3, 4)), ((3, 4), (3, 4)), ((1, 2, 3, 4),) * 2],
)
def test_keys_and_values_of_other_shapes_are_refused(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    """As many heads and tokens in both, and no batch."""
    with pytest.raises(ConfigurationError, match="do not fit"):
        LayerKV(torch.zeros(keys), torch.zeros(values))


def test_layers_of_other_lengths_are_refused() -> None:
    """All layers hold the same tokens, and there is at least one."""
    with pytest.raises(ConfigurationError, match="5, 6 tokens"):
        KVSpan((_span(6).layers[0], _span(5).layers[0]), 0)
    with pytest.raises(ConfigurationError, match="no layers"):
        KVSpan((), 0)
