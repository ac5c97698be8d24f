"""Checks of notebook 06: who draws which samples, buckets, accumulation, the batch that pays.

    from labsupport.checks import data_parallel as check
    check.largest_world_size(answer)
    check.bucket(mean_in_one_message, ranks)       # runs it on the ranks, and counts its messages

What a learner wrote runs on the pool that the notebook made; its errors become the hint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.checks import Verdict, blank, is_blank, not_yet, number, right
from labsupport.checks.on_ranks import try_on_ranks
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.parallel.ddp import data_parallel
from labsupport.ranks import Ranks
from labsupport.sampler import ShardedSampler

NOISE_SCALE, TOKENS_A_RANK, MOST_READ = 20_000, 2_048, 1.5
SAMPLES, EPOCHS = 20, 3
SHAPES = ((3, 4), (5,), (2, 2))
MICRO_BATCHES, ROWS = 3, 4
DEADLINE_S = 20.0


def epochs(answer: Any) -> Verdict:
    """`orders(sampler, epochs)` gives the ids of each epoch: other orders, that a seed repeats."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted")

    def ids(epochs: int) -> Any:
        return answer(ShardedSampler(range(SAMPLES), rank=1, world_size=2, seed=0), epochs)

    try:
        given, again = ids(EPOCHS), ids(EPOCHS)
        if is_blank(given):
            return blank("The function returns nothing yet.")
        outer, repeated = list(given), list(again)
        if outer and all(isinstance(entry, int) for entry in outer):
            return not_yet("one flat list of ids: a list of lists is wanted, one for each epoch")
        lists = [list(epoch) for epoch in outer]
        repeats = [list(epoch) for epoch in repeated] == lists
    except Exception as error:
        return not_yet(f"it raises {type(error).__name__}: {error}")
    sampler, wanted = ShardedSampler(range(SAMPLES), rank=1, world_size=2, seed=0), []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        wanted.append(list(sampler))
    if lists == wanted and repeats:
        return right("Another order each epoch, the same one in each run.")
    if len(lists) == EPOCHS and all(epoch == lists[0] for epoch in lists):
        return not_yet("every epoch has the same order: who tells the sampler which epoch it is?")
    if len(lists) != EPOCHS:
        return not_yet(f"{EPOCHS} epochs are asked for, the list has {len(lists)}")
    return not_yet("not the orders of epochs 0, 1, 2, …: which number goes to set_epoch?")


def largest_world_size(answer: object) -> Verdict:
    """Ranks of 2,048 tokens each that read at most 1.5 × the fewest tokens, at a scale of 20,000.

    1 + B / scale <= 1.5, so B <= 10,000: four whole ranks.
    """
    limit = (MOST_READ - 1) * NOISE_SCALE
    return number(
        answer,
        limit // TOKENS_A_RANK,
        hints={
            limit / TOKENS_A_RANK: "a rank more or less: whole ranks are wanted",
            limit // TOKENS_A_RANK + 1: "that batch reads a little more than 1.5 times as much",
            NOISE_SCALE // TOKENS_A_RANK: "that is the noise scale itself: it reads twice as much",
            limit: "that is the batch in tokens; how many ranks make it up?",
            MOST_READ * NOISE_SCALE // TOKENS_A_RANK: "1 + B / scale is 1.5, not B / scale",
        },
        why="8,192 tokens: 1.41 times the fewest tokens, 3.4 times the fewest steps.",
    )


def sampler(answer: Any) -> Verdict:
    """`ids(rank, world_size, epoch)`: of 20 samples, each one on exactly one rank per epoch."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted")
    try:
        given = [[answer(rank, 4, epoch) for rank in range(4)] for epoch in range(2)]
        if any(is_blank(ids) for ranks in given for ids in ranks):
            return blank("The function returns nothing yet.")
        drawn = [[[int(sample) for sample in ids] for ids in ranks] for ranks in given]
    except Exception as error:
        return not_yet(f"it raises {type(error).__name__}: {error}")
    for epoch, ranks in enumerate(drawn):
        lengths = {len(ids) for ids in ranks}
        if lengths != {SAMPLES // 4}:
            return not_yet(f"4 ranks get {sorted(lengths)} samples each; {SAMPLES // 4} is fair")
        everything = [sample for ids in ranks for sample in ids]
        unknown = sorted(set(everything) - set(range(SAMPLES)))
        if unknown:
            return not_yet(f"epoch {epoch}: {unknown} are not ids: they go from 0 to {SAMPLES - 1}")
        missing = sorted(set(range(SAMPLES)) - set(everything))
        if missing:
            doubled = sorted(s for s in set(everything) if everything.count(s) > 1)
            return not_yet(
                f"epoch {epoch}: samples {doubled} come twice or more, {missing} never: "
                "do all ranks cut their part from one and the same order?"
            )
    if drawn[0] == drawn[1]:
        return not_yet("disjoint and complete, but both epochs have the same order")
    if all(ids == sorted(ids) for ids in drawn[0]):
        return not_yet("disjoint and complete, but nothing is shuffled")
    return right("One order for all ranks, drawn from the epoch; the rank only says which part.")


def bucket(answer: Any, ranks: Ranks) -> Verdict:
    """`mean_in_one_message(gradients)` leaves the ranks' mean in each, by one all-reduce."""
    results = try_on_ranks(_average, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    world_size = ranks.world_size
    for rank, (worst, factor, messages) in enumerate(results):
        if messages == 0 and worst > 0 and world_size > 1:
            return blank("Nothing is sent yet.")
        if abs(factor - world_size) < 1e-3:
            return not_yet(f"rank {rank} holds the sum, {world_size} times the mean")
        if worst > 1e-6 and factor == factor:  # NaN: no common factor
            return not_yet(f"rank {rank} holds {factor:.2f} times the mean: divided by what?")
        if worst > 1e-6:
            return not_yet(
                f"on rank {rank} the gradients are not the mean: the result has to go back into "
                "the tensors of the list, piece by piece, in their own shapes"
            )
        if messages > 1:
            return not_yet(f"right means, but {messages} messages: lay the gradients end to end")
    return right("One latency instead of three, paid with two copies of every byte.")


def accumulate(answer: Any, ranks: Ranks) -> Verdict:
    """`accumulate(model, micro_batches, loss_of)` leaves the mean gradient, exchanged once."""
    results = try_on_ranks(_accumulate_and_count, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    for rank, (worst, exchanges) in enumerate(results):
        if exchanges == 0:
            return not_yet(f"rank {rank} never exchanges its gradients: the replicas drift")
        if worst > 1e-5:
            return not_yet(
                f"on rank {rank} the gradient is not the mean over ranks and micro batches"
            )
        if exchanges > 1:
            return not_yet(
                f"right gradients, but exchanged {exchanges} times: DDP decides in its forward "
                "whether the backward will sync"
            )
    return right("The forward, too, belongs under no_sync.")


def _average(answer: Any) -> tuple[float, float, int]:
    """Largest distance to the mean, the factor that all share (or NaN), the number of messages."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    mine = [torch.randn(shape, generator=generator).to(_device()) for shape in SHAPES]
    wanted = [tensor.clone() for tensor in mine]
    for tensor in wanted:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    with count_collective_bytes() as counted:
        answer(list(mine))  # a list of its own: what counts is what happens to the tensors
    if any(a.shape != b.shape for a, b in zip(mine, wanted, strict=True)):
        return float("inf"), float("nan"), counted.calls
    worst = max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))
    ratios = torch.cat([(a / b).flatten() for a, b in zip(mine, wanted, strict=True)])
    is_common = bool((ratios - ratios[0]).abs().max() < 1e-3 * ratios[0].abs())
    return worst, float(ratios[0]) if is_common else float("nan"), counted.calls


def _accumulate_and_count(answer: Any) -> tuple[float, int]:
    """Largest distance to the true mean gradient, and how often gradients were exchanged."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), _device()
    torch.manual_seed(0)
    model = data_parallel(nn.Linear(3, 1, bias=False).to(device))
    data = torch.randn((world_size, MICRO_BATCHES, ROWS, 3), device="cpu").to(device)

    def loss_of(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return model(rows).square().mean()

    alone = nn.Linear(3, 1, bias=False).to(device)
    alone.load_state_dict(model.module.state_dict())
    loss_of(alone, data.flatten(0, 2)).backward()  # type: ignore[no-untyped-call]
    with count_collective_bytes() as counted:
        answer(model, list(data[rank]), loss_of)
    sizes = counted.sizes_bytes.get("allreduce", [])
    found, wanted = model.module.weight.grad, alone.weight.grad
    assert wanted is not None
    worst = float("inf") if found is None else float((found - wanted).abs().max())
    return worst, sum(size >= wanted.numel() * wanted.element_size() for size in sizes)


def _device() -> torch.device:
    """Where this rank's tensors have to be: its GPU under nccl."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
