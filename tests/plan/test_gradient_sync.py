"""Buckets on paper: worked by hand, and cut as the real wrapper cuts a real model."""

from __future__ import annotations

import pytest
import torch

from labsupport.config import ModelConfig
from labsupport.model import Llama
from labsupport.parallel import hand_ddp
from labsupport.plan.gradient_sync import (
    Gradient,
    cut_into_buckets,
    gradients_of,
    sync_after_backward,
    sync_during_backward,
)
from labsupport.plan.links import Road

# An all-reduce of S over 2 ranks takes 2 steps of 0.5 s and S bytes at 100 bytes a second.
GRADIENTS = (
    Gradient(size_bytes=100, ready=0.5),
    Gradient(size_bytes=50, ready=0.75),
    Gradient(size_bytes=50, ready=1.0),
)
LINK = Road(name="rope", latency_s=0.5, bandwidth_bytes_per_s=100.0, basis="made up")


@pytest.mark.parametrize("name", ["tiny", "15m", "125m", "1b", "llama-3.1-8b"])
def test_sizes_are_those_of_the_model_from_last_to_first(name: str) -> None:
    config = ModelConfig.named(name)
    with torch.device("meta"):
        model = Llama(config)
    real = [2 * param.numel() for param in model.parameters()][::-1]
    gradients = gradients_of(config, bytes_per_gradient=2)
    assert [gradient.size_bytes for gradient in gradients] == real
    assert sum(real) == 2 * config.num_params
    ready = [gradient.ready for gradient in gradients]
    assert ready == sorted(ready)
    assert ready[-2:] == pytest.approx([1, 1])  # the first block's, then the embedding's


@pytest.mark.parametrize("bucket_bytes", [1, 2**16, 2**20, 2**30])
def test_buckets_are_those_of_the_wrapper(bucket_bytes: int) -> None:
    config = ModelConfig.named("tiny")
    params = list(Llama(config).parameters())[::-1]
    real = [
        sum(4 * param.numel() for param in bucket)
        for bucket in hand_ddp.cut_into_buckets(params, bucket_bytes=bucket_bytes)
    ]
    buckets = cut_into_buckets(gradients_of(config), bucket_bytes=bucket_bytes)
    assert [bucket.size_bytes for bucket in buckets] == real


def test_after_the_backward_everything_is_exposed() -> None:
    plan = sync_after_backward(GRADIENTS, bucket_bytes=100, backward_s=10, link=LINK, world_size=2)
    assert [(m.size_bytes, m.start_s, m.end_s) for m in plan.messages] == [
        (100, 10, 12),
        (100, 12, 14),
    ]
    assert plan.exposed_s == plan.communication_s == 4


def test_during_the_backward_only_what_comes_late_is_exposed() -> None:
    plan = sync_during_backward(GRADIENTS, bucket_bytes=100, backward_s=10, link=LINK, world_size=2)
    assert [(m.start_s, m.end_s) for m in plan.messages] == [(5, 7), (10, 12)]
    assert (plan.communication_s, plan.exposed_s) == (4, 2)


def test_a_message_waits_for_the_one_before() -> None:
    plan = sync_during_backward(GRADIENTS, bucket_bytes=1, backward_s=4, link=LINK, world_size=2)
    assert [(m.start_s, m.end_s) for m in plan.messages] == [(2, 4), (4, 5.5), (5.5, 7)]


def test_one_rank_sends_nothing() -> None:
    plan = sync_after_backward(GRADIENTS, bucket_bytes=1, backward_s=1, link=LINK, world_size=1)
    assert plan.exposed_s == 0


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0 must be at least 1"):
        cut_into_buckets(GRADIENTS, bucket_bytes=0)
