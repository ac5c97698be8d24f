"""Ring attention on paper: hand-worked numbers. Measured ones: tests/parallel."""

from __future__ import annotations

import pytest

from labsupport.config import ModelConfig
from labsupport.plan.context import contiguous_pairs, ring_cost, zigzag_pairs

GQA = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)


def test_bytes_of_two_ranks_by_hand() -> None:
    cost = ring_cost(GQA, context_parallel_size=2, batch_size=1, seq_len=8, element_bytes=2)
    part = 2 * 2 * 4 * 8  # k and v: 2 tensors, 2 heads, 4 tokens, head_dim 8
    assert cost.forward_sent_bytes == part * 2
    assert cost.backward_sent_bytes == part * 2 + 2 * part * 4
    assert cost.kept_bytes == (2 * 4 * 4 * 8 + part) * 2 + 4 * 4 * 4
    assert cost.scores_bytes == 4 * 2 * 2 * 4  # 4 heads, chunks of 2 tokens, fp32


def test_one_rank_sends_nothing() -> None:
    cost = ring_cost(GQA, context_parallel_size=1, batch_size=1, seq_len=8)
    assert cost.forward_sent_bytes == cost.backward_sent_bytes == 0


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_memory_falls_with_the_ring_and_messages_hardly_grow(n: int) -> None:
    """In all n - 1 of n parts are sent, so a longer ring adds ever less to what a rank sends."""
    one = ring_cost(GQA, context_parallel_size=1, batch_size=2, seq_len=48 * 8)
    ring = ring_cost(GQA, context_parallel_size=n, batch_size=2, seq_len=48 * 8)
    whole_kv_bytes = 2 * 2 * (48 * 8) * 2 * 8 * 4
    assert ring.kept_bytes * n == one.kept_bytes
    assert ring.scores_bytes * n**2 == one.scores_bytes
    assert ring.forward_sent_bytes * n == whole_kv_bytes * (n - 1)


def test_work_is_uneven_without_zigzag_and_even_with_it() -> None:
    assert contiguous_pairs(16, context_parallel_size=4) == (16, 32, 48, 64)
    assert zigzag_pairs(16, context_parallel_size=4) == (36, 36, 36, 36)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
def test_the_slowest_rank_of_a_long_ring_has_twice_the_mean(n: int) -> None:
    uneven = contiguous_pairs(12 * 64, context_parallel_size=n)
    assert max(uneven) / (sum(uneven) / n) == pytest.approx(2 * n / (n + 1))
    assert max(zigzag_pairs(12 * 64, context_parallel_size=n)) <= max(uneven)


def test_refusals_name_a_length_that_works() -> None:
    with pytest.raises(ValueError, match=r"seq_len=100 .* multiple of 8 .* 96"):
        ring_cost(GQA, context_parallel_size=4, batch_size=1, seq_len=100)
    with pytest.raises(ValueError, match=r"seq_len=7 .* 6"):
        contiguous_pairs(7, context_parallel_size=3)
    with pytest.raises(ValueError, match=r"seq_len=6 .* 4"):
        zigzag_pairs(6, context_parallel_size=2)
    with pytest.raises(ValueError, match="context_parallel_size"):
        zigzag_pairs(6, context_parallel_size=0)
