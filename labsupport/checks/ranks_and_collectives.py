"""Checks of notebook 01: bytes, order of sums, and collectives written from send and receive.

    from labsupport.checks import ranks_and_collectives as check
    check.all_to_all_bytes(answer)
    check.all_gather(my_all_gather, ranks)      # runs it on the ranks, beside the library's

What a learner wrote runs on the pool that the notebook made; its errors become the hint.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from labsupport.checks import Verdict, blank, is_blank, not_yet, number, right
from labsupport.checks.on_ranks import try_on_ranks
from labsupport.measure.sent import count_sent_bytes
from labsupport.plan.traffic import all_to_all_sent_bytes
from labsupport.ranks import Ranks

MIB = 2**20
PIECE = 1000
DEADLINE_S = 20.0


def all_to_all_bytes(answer: object) -> Verdict:
    """Bytes that a rank sends to others in an all-to-all of 1 MiB over 4 ranks."""
    (expected, *_) = all_to_all_sent_bytes(size_bytes=MIB, world_size=4)
    return number(
        answer,
        expected,
        hints={
            MIB: "one of the four pieces is for the rank itself and is not sent",
            MIB / 4: "that is one piece; it sends one to each of the others",
            3 * MIB: "it sends different pieces to the others, not the whole tensor to each",
            expected * 4: "that is what all four ranks send together",
        },
        why="(n - 1)/n of the tensor: the piece for yourself stays.",
    )


def order_matters(a: object, b: object, c: object) -> Verdict:
    """Three numbers whose float32 sum depends on the order."""
    if is_blank([a, b, c]):
        return blank()
    try:
        x, y, z = (torch.tensor(float(value), dtype=torch.float32) for value in (a, b, c))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return not_yet("three numbers are wanted")
    if not all(math.isfinite(value) for value in (x + y + z, x + (y + z))):
        return not_yet("find finite numbers whose sum is finite too")
    first, second = ((x + y) + z).item(), (x + (y + z)).item()
    if first == second:
        return not_yet(f"both orders give {first:g}: the numbers are too much alike in size")
    return right(f"(a + b) + c is {first:.9g}, a + (b + c) is {second:.9g}.")


def swap(answer: Any, ranks: Ranks) -> Verdict:
    """`swap(tensor, partner)` gives what the partner sent, on pairs of neighbours."""
    results = try_on_ranks(_swap_with_partner, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    for rank, (mine, given, partners) in enumerate(results):
        if given is None:
            return blank("The function returns nothing yet.")
        if given == mine:
            return not_yet(f"rank {rank} gets its own tensor back")
        if given != partners:
            return not_yet(f"rank {rank} does not get its partner's tensor")
    return right("Somebody has to listen while somebody speaks.")


def all_gather(answer: Any, ranks: Ranks) -> Verdict:
    """`my_all_gather(piece)` gives the list of all pieces, sending at most n - 1 of them."""
    results = try_on_ranks(_all_gather_beside_library, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    most = (ranks.world_size - 1) * PIECE * 4
    for rank, (given, expected, sent_bytes) in enumerate(results):
        if given is None:
            return blank("The function returns nothing yet.")
        if len(given) != len(expected):
            return not_yet(f"rank {rank} returns {len(given)} pieces, {len(expected)} are wanted")
        wrong = [i for i, piece in enumerate(given) if piece != expected[i]]
        if wrong and Counter(given) == Counter(expected):  # whatever they are
            return not_yet(f"rank {rank} has every piece, but not in rank order")
        if wrong:
            return not_yet(f"on rank {rank}, entry {wrong[0]} is not rank {wrong[0]}'s piece")
        if sent_bytes > most:
            pieces = sent_bytes / (PIECE * 4)
            return not_yet(f"rank {rank} sends {pieces:g} pieces; n - 1 are enough")
        if sent_bytes == 0 and ranks.world_size > 1:
            return not_yet("right result, but build it from send and recv, not from the library's")
    return right("n - 1 steps, one piece a step: what the library's ring does.")


def tree_broadcast(answer: Any, ranks: Ranks) -> Verdict:
    """`tree_broadcast(tensor)` fills every rank's tensor with rank 0's in log2(n) rounds."""
    results = try_on_ranks(_broadcast_and_count, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    rounds = math.ceil(math.log2(ranks.world_size))
    wrong = [rank for rank, (is_right, _) in enumerate(results) if not is_right]
    if wrong:
        return not_yet(f"rank {wrong[0]} does not hold rank 0's tensor")
    messages = [count for _, count in results]
    if sum(messages) == 0 and ranks.world_size > 1:
        return not_yet("right result, but build it from send and recv, not from the library's")
    if max(messages) > rounds:
        return not_yet(
            f"rank {messages.index(max(messages))} sends {max(messages)} times; "
            f"with a tree, {rounds} are enough: let those who have it help"
        )
    return right(
        "log2(n) rounds beat n - 1 for small messages; for large ones a ring of chunks "
        "keeps every link busy."
    )


def _swap_with_partner(answer: Any) -> tuple[Any, Any, Any]:
    rank, device = dist.get_rank(), _device()
    partner = rank ^ 1  # 0 with 1, 2 with 3
    mine = torch.full((PIECE,), float(rank), device=device)
    if partner >= dist.get_world_size():
        return 0.0, 1.0, 1.0
    given = answer(mine.clone(), partner)
    return float(rank), _constant(given), float(partner)


def _all_gather_beside_library(answer: Any) -> tuple[Any, list[float], int]:
    piece = torch.full((PIECE,), 10.0 + dist.get_rank(), device=_device())
    with count_sent_bytes() as sent:
        given = answer(piece.clone())
    expected = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(expected, piece)
    if given is None or given is ...:
        return None, [], 0
    return (
        [_constant(one) for one in given],
        [_constant(one) for one in expected],
        sent.total_bytes,
    )


def _broadcast_and_count(answer: Any) -> tuple[bool, int]:
    tensor = torch.full((PIECE,), 7.0 + dist.get_rank(), device=_device())
    with count_sent_bytes() as sent:
        answer(tensor)
    return _constant(tensor) == 7.0, sent.messages


def _constant(tensor: Any) -> Any:
    """The one value of a tensor that is full of it, None for anything else."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    first = tensor.flatten()[0]
    return first.item() if bool((tensor == first).all()) and tensor.numel() == PIECE else math.nan


def _device() -> torch.device:
    """Where this rank's tensors have to be: its GPU under nccl."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
