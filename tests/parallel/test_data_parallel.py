"""By hand and by torch: loss, norm, gradients and weights of every rank equal one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from labsupport import RankError, Ranks
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.hand_ddp import (
    BucketedDDP,
    HandWrittenDDP,
    OverlappedDDP,
    PerTensorDDP,
    cut_into_buckets,
)
from labsupport.train.proof import Wrap, prove_equal
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL

SMALL_BUCKET = 2**14


def bucketed(model: nn.Module) -> nn.Module:
    return BucketedDDP(model, bucket_bytes=SMALL_BUCKET)


def overlapped(model: nn.Module) -> nn.Module:
    return OverlappedDDP(model, bucket_bytes=SMALL_BUCKET)


BY_HAND: list[Wrap] = [PerTensorDDP, bucketed, overlapped]
WRAPPERS: list[Wrap] = [*BY_HAND, data_parallel]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_equal_to_one_process(two: Ranks, wrap: Wrap) -> None:
    """Unequal tokens, accumulation, clipping, tied embeddings, weights that differ at the start."""
    for case in (
        {},
        {"model": replace(PROOF_MODEL, tie_word_embeddings=True)},
        {"config": replace(PROOF_CONFIG, optimizer="sgd", gradient_accumulation_steps=3)},
        {"config": replace(PROOF_CONFIG, grad_clip=None, gradient_accumulation_steps=1)},
    ):
        proof = prove_equal(two, wrap, **case)
        assert proof.is_equal, (case, proof)
        assert [rank.rank for rank in proof.ranks] == [0, 1]


# ---- any module --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen, shared, half-used and unused parameters, three dtypes, strides, buffers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.wide = nn.Linear(3, 3).to(torch.float64)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)
        self.shared = self.first
        self.strided = Parameter(torch.randn(4, 3).t())
        self.rows = nn.Embedding(5, 3, sparse=True)
        self.empty = Parameter(torch.zeros(0))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([bool(seed), True]))

    def forward(self, x: Tensor, *, use_sometimes: bool) -> Tensor:
        x = self.shared(self.frozen(self.first(x)))
        x = self.narrow(x.to(torch.bfloat16)).double()
        x = self.wide(x).float() + self.rows(torch.tensor([1, 2])).sum()
        x = self.norm(x)
        if use_sometimes:
            x = self.sometimes(x)
        return (x @ self.strided).square().sum() + self.empty.sum()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if param.grad is None else param.grad.to_dense().clone()
        for name, param in module.named_parameters()
    }


def backwards(model: nn.Module, rank: int, *, of_both: bool = False) -> None:
    """Two micro batches, the first without exchange; rank 1 alone uses `sometimes`."""
    torch.manual_seed(10 + rank)
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    with model.no_sync() if isinstance(model, HandWrittenDDP) else torch.enable_grad():
        model(first, use_sometimes=rank == 1 or of_both).backward()
    model(second, use_sometimes=of_both).backward()


def odd_differences(wrap: Any) -> dict[str, Any]:
    """On a rank: the wrapper's gradients against the mean of what bare copies computed."""
    rank = dist.get_rank()
    model = wrap(Odd(seed=rank))
    bare = copy.deepcopy(model.module)
    backwards(bare, rank)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradients(bare))
    backwards(model, rank)
    model.finish_gradient_sync()
    worst = 0.0
    for name, mine in gradients(model.module).items():
        shares = [share[name] for share in everyones if share[name] is not None]
        if not shares:
            assert mine is None, f"{name} has a gradient that no rank computed"
            continue
        assert mine is not None, f"{name} lost its gradient"
        mean = sum(share.double() for share in shares) / len(everyones)
        scale = mean.abs().max().item() if mean.numel() else 1.0
        rounding = 2**-7 if mine.dtype == torch.bfloat16 else 2e-6
        difference = (mine.double() - mean).abs().max().item() if mean.numel() else 0.0
        worst = max(worst, difference / (scale or 1.0) / rounding)
    state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    return {"worst": worst, "start": {name: state[name] for name in ("mask", "first.weight")}}


@pytest.mark.parametrize("wrap", [PerTensorDDP, BucketedDDP, OverlappedDDP])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20])
def test_any_module(two: Ranks, wrap: Any, bucket_bytes: int) -> None:
    if wrap is not PerTensorDDP:
        wrap = bucketed_as(wrap, bucket_bytes)
    zero, one = two.run(odd_differences, wrap)
    assert max(zero["worst"], one["worst"]) <= 1
    expected = Odd(seed=0)  # rank 0's weights and buffers went to all
    for rank in (zero, one):
        assert torch.equal(rank["start"]["mask"], expected.mask)
        assert torch.equal(rank["start"]["first.weight"], expected.first.weight)


def bucketed_as(wrap: Any, bucket_bytes: int) -> Any:
    return lambda module: wrap(module, bucket_bytes=bucket_bytes)


def test_all_frozen_is_no_error(two: Ranks) -> None:
    def on_rank() -> bool:
        model = PerTensorDDP(nn.Linear(2, 2).requires_grad_(False))
        model.finish_gradient_sync()
        return model.module.weight.grad is None

    assert two.run(on_rank) == [True, True]
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        data_parallel(nn.Linear(2, 2).requires_grad_(False))


# ---- buckets -----------------------------------------------------------------------------------


def test_buckets_are_cut_in_order_by_size_and_dtype() -> None:
    sizes = [10, 10, 30, 5, 5]
    params = [Parameter(torch.zeros(size)) for size in sizes]
    params.insert(1, Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    params.append(Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    buckets = cut_into_buckets(params, bucket_bytes=80)
    found = [[(p.numel(), p.element_size()) for p in bucket] for bucket in buckets]
    assert found == [[(10, 4), (10, 4)], [(4, 2), (4, 2)], [(30, 4)], [(5, 4), (5, 4)]]
    with pytest.raises(ValueError, match=r"bucket_bytes=0 must be at least 1"):
        cut_into_buckets(params, bucket_bytes=0)


def test_messages_and_bytes_are_counted(two: Ranks) -> None:
    def on_rank(wrap: Any) -> tuple[int, int]:
        model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        with model.no_sync():
            model(torch.ones(1, 8)).sum().backward()
        model(torch.ones(1, 8)).sum().backward()
        model.finish_gradient_sync()
        return model.num_all_reduces, model.sent_bytes

    layer_bytes = (64 + 8) * 4
    expected = {PerTensorDDP: 4, BucketedDDP: 1, OverlappedDDP: 1}
    for wrap, messages in expected.items():
        assert two.run(on_rank, wrap) == [(messages, 2 * layer_bytes)] * 2
    by_layer = bucketed_as(OverlappedDDP, layer_bytes)
    assert two.run(on_rank, by_layer) == [(2, 2 * layer_bytes)] * 2


def test_messages_leave_in_one_order_whatever_the_backward_does(two: Ranks) -> None:
    """Rank 0 uses the layers as a, b, rank 1 as b, a: their gradients come in opposite orders."""

    def on_rank() -> list[float]:
        torch.manual_seed(0)
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        model = OverlappedDDP(module, bucket_bytes=1)
        order, x = ("a", "b") if dist.get_rank() == 0 else ("b", "a"), torch.ones(1, 2)
        for name in order:
            x = module[name](x)
        x.sum().backward()
        mine = [param.grad.clone() for param in model.trained]
        model.finish_gradient_sync()
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, mine)
        means = [(p + q) / 2 for p, q in zip(*everyones, strict=True)]
        pairs = zip(model.trained, means, strict=True)
        return [(param.grad - mean).abs().max().item() for param, mean in pairs]

    for differences in two.run(on_rank):
        assert max(differences) < 1e-6


# ---- wrong use ---------------------------------------------------------------------------------


def test_a_second_backward_without_no_sync_is_told(two: Ranks) -> None:
    def on_rank() -> None:
        model = OverlappedDDP(nn.Linear(2, 2))
        for _ in range(2):
            model.module(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankError, match="a second backward after gradients have left: put all"):
        two.run(on_rank)


def test_a_forgotten_finish_is_told(two: Ranks) -> None:
    def on_rank() -> None:
        model = OverlappedDDP(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2))

    with pytest.raises(RankError, match=r"on their way: .* call finish_gradient_sync\(\) after"):
        two.run(on_rank)


def test_a_wrapper_that_is_thrown_away_sends_nothing_more(two: Ranks) -> None:
    def on_rank() -> int:
        module = nn.Linear(2, 2)
        old = OverlappedDDP(module)
        del old
        model = OverlappedDDP(module)
        with count_collective_bytes() as counted:
            model(torch.ones(1, 2)).sum().backward()
            model.finish_gradient_sync()
        return counted.calls

    assert two.run(on_rank) == [2, 2]  # one bucket, and who has a gradient
