"""The checks of notebook 06: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labsupport import Ranks
from labsupport.checks import data_parallel as check


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, threads_per_rank=1) as pool:
        yield pool


def good_orders(sampler: Any, epochs: int) -> list[list[int]]:
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


@pytest.mark.filterwarnings("ignore:epoch 0 is drawn again")
def test_epochs() -> None:
    assert check.epochs(...).status == "blank"
    assert check.epochs(lambda sampler, epochs: None).status == "blank"
    assert check.epochs(good_orders).is_right
    same = check.epochs(lambda sampler, epochs: [list(sampler) for _ in range(epochs)])
    assert "every epoch has the same order" in same.hint
    assert "the list has 2" in check.epochs(lambda s, epochs: good_orders(s, 2)).hint
    late = check.epochs(lambda s, epochs: good_orders(s, epochs + 1)[1:])
    assert "which number goes to set_epoch" in late.hint
    assert "TypeError" in check.epochs(list).hint
    assert check.epochs(lambda sampler, epochs: [... for _ in range(epochs)]).status == "blank"
    assert "one for each epoch" in check.epochs(lambda sampler, epochs: list(sampler)).hint


def test_largest_world_size() -> None:
    assert check.largest_world_size(...).status == "blank"
    assert check.largest_world_size(4).is_right
    assert "a little more" in check.largest_world_size(5).hint
    assert "reads twice" in check.largest_world_size(9).hint
    assert "how many ranks" in check.largest_world_size(10_000).hint


def good_ids(rank: int, world_size: int, epoch: int) -> list[int]:
    order = list(range(20))
    random.Random(epoch).shuffle(order)
    return order[rank::world_size]


def own_shuffle(rank: int, world_size: int, epoch: int) -> list[int]:
    order = list(range(20))
    random.Random(1000 * epoch + rank).shuffle(order)
    return order[: 20 // world_size]


def forgets_to_return(rank: int, world_size: int, epoch: int) -> None:
    good_ids(rank, world_size, epoch)


def test_sampler() -> None:
    assert check.sampler(...).status == "blank"
    assert check.sampler(good_ids).is_right
    repeats = check.sampler(own_shuffle)
    assert "come twice or more" in repeats.hint
    assert "one and the same order" in repeats.hint
    assert "same order" in check.sampler(lambda rank, n, epoch: good_ids(rank, n, 0)).hint
    assert "is fair" in check.sampler(lambda rank, n, epoch: list(range(20))).hint
    assert "shuffled" in check.sampler(lambda rank, n, e: sorted(good_ids(rank, n, e))).hint
    assert check.sampler(lambda rank, n, e: torch.tensor(good_ids(rank, n, e))).is_right
    assert check.sampler(forgets_to_return).status == "blank"
    from_one = check.sampler(lambda rank, n, e: [i + 1 for i in good_ids(rank, n, e)])
    assert "[20] are not ids" in from_one.hint


def flat_mean(gradients: list[Tensor], divide: bool = True) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    if divide:
        flat /= dist.get_world_size()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def one_each(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def flat_only(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)


def by_the_list(gradients: list[Tensor]) -> None:
    flat_mean(gradients, divide=False)
    for gradient in gradients:
        gradient /= len(gradients)


def into_the_list(gradients: list[Tensor]) -> None:
    """New tensors in the list; those that it held are as before."""
    flat_mean(new := [gradient.clone() for gradient in gradients])
    gradients[:] = new


def other_shapes(gradients: list[Tensor]) -> None:
    flat_mean(gradients)
    for gradient in gradients:
        gradient.data = gradient.data.flatten()


def test_bucket(ranks: Ranks) -> None:
    assert check.bucket(..., ranks).status == "blank"
    assert check.bucket(lambda gradients: 1, ranks).status == "blank"
    assert check.bucket(flat_mean, ranks).is_right
    assert "2 times the mean" in check.bucket(lambda g: flat_mean(g, divide=False), ranks).hint
    assert "3 messages" in check.bucket(one_each, ranks).hint
    assert "has to go back" in check.bucket(flat_only, ranks).hint
    assert "0.67 times the mean" in check.bucket(by_the_list, ranks).hint
    assert "has to go back" in check.bucket(into_the_list, ranks).hint
    assert "own shapes" in check.bucket(other_shapes, ranks).hint
    assert "NameError" in check.bucket(lambda g: undefined, ranks).hint  # type: ignore[name-defined]  # noqa: F821


Loss = Callable[[Any, Tensor], Tensor]


def good_accumulate(model: Any, micro_batches: list[Tensor], loss_of: Loss) -> None:
    for i, rows in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            (loss_of(model, rows) / len(micro_batches)).backward()


def forward_outside(model: Any, micro_batches: list[Tensor], loss_of: Loss) -> None:
    for i, rows in enumerate(micro_batches):
        loss = loss_of(model, rows) / len(micro_batches)
        with nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            loss.backward()


def never(model: Any, micro_batches: list[Tensor], loss_of: Loss) -> None:
    with model.no_sync():
        for rows in micro_batches:
            (loss_of(model, rows) / len(micro_batches)).backward()


def undivided(model: Any, micro_batches: list[Tensor], loss_of: Loss) -> None:
    for i, rows in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            loss_of(model, rows).backward()


def test_accumulate(ranks: Ranks) -> None:
    assert check.accumulate(..., ranks).status == "blank"
    assert check.accumulate(good_accumulate, ranks).is_right
    assert "exchanged 3 times" in check.accumulate(forward_outside, ranks).hint
    assert "never exchanges" in check.accumulate(never, ranks).hint
    assert "not the mean" in check.accumulate(undivided, ranks).hint
