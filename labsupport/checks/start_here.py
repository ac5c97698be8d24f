"""Checks for the exercises of 00_start_here: prints, tokens, sums and means over ranks, seeds.

    from labsupport.checks import start_here as check
    check.global_batch_tokens(65_536)

Two exercises write code for ranks; it runs on a small pool of ranks, which is closed afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from labsupport.checks import Verdict, blank, is_blank, not_yet, number, numbers, right
from labsupport.ranks import RankError, Ranks

DEADLINE_S = 30.0
RANKS_OF_CHECK = 3
LOSSES_PART = 1e-2
"""Nats by which two curves must differ somewhere to count as parted."""


def whose_print(answer: object) -> Verdict:
    """Exercise 1: which of four ranks print under `if rank % 2 == 1`."""
    if is_blank(answer):
        return blank()
    if isinstance(answer, set | tuple | range):
        answer = sorted(answer) if isinstance(answer, set) else list(answer)
    if answer == [0, 2]:
        return not_yet("`rank % 2 == 1` is true for odd ranks; rank 0 is even")
    if answer == [2, 4]:
        return not_yet("ranks are counted from 0: four ranks are 0, 1, 2 and 3")
    if answer == [0, 1, 2, 3]:
        return not_yet("all four run the cell, but each asks the `if` about its own rank")
    return numbers(answer, [1, 3], why="the cell runs everywhere; the `if` decides on each rank")


def global_batch_tokens(answer: object) -> Verdict:
    """Exercise 2: tokens in the global batch of 8 ranks that read 4 sequences of 2,048 each."""
    return number(
        answer,
        8 * 4 * 2048,
        rel=1e-9,
        hints={
            4 * 2048: "that is what one rank reads; the global batch is what all ranks read",
            8 * 4: "those are sequences; each holds many tokens",
            8 * 2048: "every rank reads more than one sequence",
        },
        why="ranks × sequences on each × tokens in each",
    )


def another_world_size(answer: object) -> Verdict:
    """Exercise 3: numbers_after_all_reduce(world_size), called for three ranks."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted; `def numbers_after_all_reduce(world_size): ...`")
    try:
        held = answer(RANKS_OF_CHECK)
    except Exception as error:  # whatever the learner's code raises is told, not raised
        return not_yet(f"for three ranks it raises {type(error).__name__}: {error}")
    if is_blank(held):
        return blank("The function still returns nothing: return what `pool.run(...)` gives.")
    listed = _plain(held)
    if listed == [10.0, 20.0, 30.0]:
        return not_yet("these are the ranks' own numbers: nobody has called all_reduce yet")
    if isinstance(listed, list) and len(listed) == 2:
        return not_yet("that is two ranks; make the pool from the argument: `Ranks(world_size)`")
    if listed == 60.0:
        return not_yet("return the whole list that `run` gives, one number a rank")
    return numbers(listed, [60.0] * 3, why="10 + 20 + 30, and every rank holds it")


def mean_over_ranks(answer: object) -> Verdict:
    """Exercise 4: mean_over_ranks(x), run on three ranks that hold different x."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted; `def mean_over_ranks(x): ...`")
    try:
        with Ranks(RANKS_OF_CHECK) as pool:
            held = pool.run(answer, _OwnTensor(pool.device), deadline_s=DEADLINE_S)
    except (RankError, TypeError) as error:
        return not_yet(f"on three ranks: {error}")
    return _judge_mean([_plain(one) for one in held])


def _judge_mean(held: Sequence[object]) -> Verdict:
    """`held[rank]` is what the learner's function returned there; the mean of 1, 2, 3 is 2."""
    if any(one is None or one is ... for one in held):
        return blank("The function still returns nothing on a rank: finish its last line.")
    own = [[1.0 + rank, 10.0 * (1 + rank)] for rank in range(RANKS_OF_CHECK)]
    mistakes: list[tuple[object, str]] = [
        (own, "every rank got its own x back: no all_reduce has taken place"),
        ([[6.0, 60.0]] * 3, "that is the sum, three times too large: what turns it into a mean?"),
        ([[3.0, 30.0]] * 3, "divided by 2: how many ranks are there? Ask `world_size`"),
        ([11.0] * 3, "one number came back: average over ranks, not over the entries of x"),
    ]
    for wrong, hint in mistakes:
        if held == wrong:
            return not_yet(hint)
    for rank, one in enumerate(held):
        verdict = numbers(one, [2.0, 20.0], rel=1e-5)
        if not verdict.is_right:
            return not_yet(f"on rank {rank}: {verdict.hint}")
    return right("on every rank, for any number of ranks")


class _OwnTensor:
    """Pickled here, but made on the rank that loads it: x is another tensor on each."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Callable[[str], torch.Tensor], tuple[str]]:
        return _own_tensor, (self.device,)


def _own_tensor(device: str) -> torch.Tensor:
    rank = int(os.environ["RANK"])
    place = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    return torch.tensor([1.0, 10.0], device=place) * (1 + rank)


def curves_part(answer: object, reference: Sequence[float]) -> Verdict:
    """Exercise 5: what `ranks.run(train, ...)` gave with another seed on one rank only.

    `reference` are the losses of the run with one seed everywhere.
    """
    if is_blank(answer):
        return blank()
    runs = answer if isinstance(answer, list) else []
    if len(runs) < 2 or not all(isinstance(one, Mapping) and "weights" in one for one in runs):
        return not_yet("the list that `ranks.run` returns is wanted, one result a rank")
    steps = min(len(reference), *(len(one["losses"]) for one in runs))
    if steps < 2:
        return not_yet("train for a few steps, so that there are curves to compare")
    losses = [sum(one["losses"][i] for one in runs) / len(runs) for i in range(steps)]
    apart = max(abs(a - b) for a, b in zip(losses, reference, strict=False))
    if _largest_gap(runs[0]["weights"], runs[1]["weights"]) == 0.0:
        same = "and the curves coincide: nothing has changed yet" if apart < LOSSES_PART else ""
        return not_yet(f"all ranks still hold equal weights {same}".strip() + _ONE_ONLY)
    if apart < LOSSES_PART:
        return not_yet("the curves hardly part; is it the seed of the weights that you changed?")
    return right("equal gradients applied to unequal weights: these are no longer replicas")


_ONE_ONLY = "; a function on the ranks can read `rank`, and give one of them another seed"


def _largest_gap(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _plain(value: Any) -> Any:
    """Tensors as numbers and lists, also inside a list; a single entry as the number itself."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value
