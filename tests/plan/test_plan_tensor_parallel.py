"""Tensor parallelism on paper: worked by hand, and against the shapes of a real model."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from labsupport.config import ModelConfig, Recompute
from labsupport.model import Llama
from labsupport.plan.activations import RECIPES, block_activations
from labsupport.plan.links import Road
from labsupport.plan.tensor_parallel import (
    local_params,
    local_shapes,
    split_block_bytes,
    tensor_parallel_calls,
)
from labsupport.plan.tensor_parallel_step import largest_size, tensor_parallel_time

TINY = ModelConfig.named("tiny")
STEP = {"tensor_parallel_size": 2, "micro_batch_size": 8, "seq_len": 128}
STREAM = 8 * 128 * 128 * 4  # b·s·h numbers of 4 bytes


def test_a_block_sends_the_stream_four_times_and_the_ends_twice() -> None:
    calls = tensor_parallel_calls(TINY, **STEP)
    assert calls.layer_bytes == 4 * STREAM
    assert calls.bytes_at("embedding") == calls.bytes_at("head") == STREAM
    assert calls.bytes_at("loss") == 3 * 8 * 128 * 4
    assert calls.step_bytes == (4 * TINY.num_layers + 2) * STREAM + calls.bytes_at("loss")
    assert calls.token_bytes == calls.step_bytes / (8 * 128)
    assert calls.num_calls == 4 * TINY.num_layers + 2 + 3


def test_sequence_parallel_sends_as_much_over_the_link() -> None:
    plain = tensor_parallel_calls(TINY, **STEP)
    cut = tensor_parallel_calls(TINY, **STEP, sequence_parallel=True)
    stream = plain.bytes_of("all_reduce") - plain.bytes_at("loss")
    # a ring all-reduce is a reduce-scatter and an all-gather: each as large as it is
    assert cut.bytes_of("all_gather") == cut.bytes_of("reduce_scatter") == stream
    assert cut.bytes_at("norm gradients") == (2 * TINY.num_layers + 1) * 128 * 4


def test_recomputation_and_micro_batches_send_again() -> None:
    once = tensor_parallel_calls(TINY, **STEP).bytes_at("layers")
    every_other = Recompute(mode="full", every=2)
    again = tensor_parallel_calls(TINY, **STEP, recompute=every_other).bytes_at("layers")
    assert again == once + 2 * STREAM  # behind o, in two blocks of four
    twice = tensor_parallel_calls(TINY, **STEP, num_micro_batches=2)
    assert twice.bytes_at("layers") == 2 * once
    assert twice.token_bytes == tensor_parallel_calls(TINY, **STEP).token_bytes


def test_one_rank_says_nothing() -> None:
    alone = tensor_parallel_calls(TINY, **{**STEP, "tensor_parallel_size": 1})
    assert alone.calls == ()
    assert alone.step_bytes == alone.layer_bytes == 0


def test_key_heads_that_all_ranks_hold_have_their_gradients_summed() -> None:
    calls = tensor_parallel_calls(TINY, **{**STEP, "tensor_parallel_size": 4})
    assert calls.bytes_at("kv gradients") == 2 * TINY.num_layers * (2 * 32 * 128) * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_named_as_the_model_and_add_up_to_it(tied: bool, size: int) -> None:
    config = replace(TINY, tie_word_embeddings=tied, vocab_size=2047)
    with torch.device("meta"):
        real = {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
    ranks = [local_shapes(config, tensor_parallel_size=size, rank=r) for r in range(size)]
    assert all(list(shapes) == list(real) for shapes in ranks)
    for name, whole in real.items():
        held = sum(prod(shapes[name]) for shapes in ranks)
        on_all = "norm" in name or (size == 4 and ("k_proj" in name or "v_proj" in name))
        assert held == prod(whole) * (size if on_all else 1), name
    assert local_params(config, tensor_parallel_size=size) == tuple(
        sum(map(prod, shapes.values())) for shapes in ranks
    )


def test_three_ranks_are_as_good_as_two_or_four() -> None:
    config = replace(TINY, hidden_size=96, num_heads=6, num_kv_heads=3, intermediate_size=288)
    sizes = local_params(config, tensor_parallel_size=3)
    assert len(sizes) == 3
    assert max(sizes) < 1.01 * min(sizes)


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (3, {}, "tensor_parallel_size=3 must divide num_heads=4"),
        (4, {"intermediate_size": 386}, "must divide intermediate_size=386"),
        (4, {"num_heads": 12, "hidden_size": 120, "num_kv_heads": 3}, "must divide num_kv_heads=3"),
        (0, {}, "tensor_parallel_size=0 must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(
    size: int, change: dict[str, int], message: str
) -> None:
    config = replace(TINY, head_dim=None, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        local_shapes(config, tensor_parallel_size=size, rank=0)


def test_a_split_stream_is_kept_once_by_all_ranks_together() -> None:
    block = block_activations(TINY, micro_batch_size=8, seq_len=128, recipe=RECIPES["fp32"])
    plain, cut = (
        split_block_bytes(block, tensor_parallel_size=2, sequence_parallel=sequence)
        for sequence in (False, True)
    )
    # T = 1024 tokens of 128 numbers: two norms keep what they read, what they give, one 1/√
    assert plain - cut == (2 * STREAM + 2 * (STREAM + 4 * 1024)) // 2
    assert plain == (block.total_bytes + 6 * STREAM + 2 * 4 * 1024) // 2  # 6 b·s·h are whole
    assert split_block_bytes(block, tensor_parallel_size=1) == block.total_bytes


# ---- time ----------------------------------------------------------------------------------------

LINK = Road(name="rope", latency_s=1e-3, bandwidth_bytes_per_s=1e9, basis="made up")
TIMED = {"micro_batch_size": 8, "seq_len": 128, "flops_per_s": 1e10, "bytes_per_number": 4}


def test_time_of_a_step_by_hand() -> None:
    time = tensor_parallel_time(TINY, tensor_parallel_size=2, link=LINK, **TIMED)
    matrices = 4 * (2 * 128 * 32 * (4 + 2) + 3 * 128 * 384) + 2048 * 128
    flops = 1024 * 3 * (2 * matrices + 4 * 4 * 128 * 128)
    assert time.compute_s == pytest.approx(flops / 2 / 1e10)
    assert time.latency_s == pytest.approx((18 + 3) * 2 * 1e-3)  # 2(n - 1) messages a call
    assert time.transfer_s == pytest.approx((18 * STREAM + 3 * 4096) / 1e9)
    assert time.utilisation == pytest.approx(time.compute_s / time.step_s)
    assert time.speedup == pytest.approx(2 * time.utilisation)


def test_alone_nothing_waits() -> None:
    time = tensor_parallel_time(TINY, tensor_parallel_size=1, link=LINK, **TIMED)
    assert (time.utilisation, time.speedup, time.communication_s) == (1, 1, 0)


def test_a_quicker_link_pays_for_more_ranks() -> None:
    def largest(bandwidth: float) -> int:
        link = replace(LINK, latency_s=1e-7, bandwidth_bytes_per_s=bandwidth)
        return largest_size(TINY, (2, 4), least_utilisation=0.5, link=link, **TIMED)

    assert [largest(bandwidth) for bandwidth in (1e6, 5e7, 1e9)] == [1, 2, 4]


def test_sequence_parallel_takes_as_long_but_for_the_norms() -> None:
    link = replace(LINK, latency_s=0.0)
    plain, cut = (
        tensor_parallel_time(
            TINY, tensor_parallel_size=2, link=link, sequence_parallel=sequence, **TIMED
        )
        for sequence in (False, True)
    )
    assert cut.transfer_s - plain.transfer_s == pytest.approx(9 * 128 * 4 / 1e9)
