"""What do tensor-parallel ranks say to each other? Four functions, each the mirror of another.

                           forward          backward         stands
    copy_to_ranks      f   nothing          all-reduce       before split matrices
    reduce_from_ranks  g   all-reduce       nothing          after them: parts become the sum
    gather_sequence        all-gather       reduce-scatter   as f, where ranks hold other tokens
    scatter_sequence       reduce-scatter   all-gather       as g, where they are to hold others

    h = copy_to_ranks(h, group)              # every rank uses h: its gradients are to be added up
    y = reduce_from_ranks(part, group)       # y = Σ parts: each part's gradient is y's

An all-reduce is a reduce-scatter and an all-gather, so sequence parallel sends the same bytes.
Shoeybi et al., 2019 (arXiv 1909.08053); Korthikanti et al., 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup
Operation = dist.ReduceOp.RedOpType


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """f: x as it is, for ranks that each compute a part of what follows from it."""
    out: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from_ranks(part: Tensor, group: Group) -> Tensor:
    """g: the sum of the ranks' parts, on every rank."""
    out: Tensor = _ReduceFromRanks.apply(part, group)  # type: ignore[no-untyped-call]
    return out


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens, in order, of x (batch, seq / n, …) -> (batch, seq, …).

    What multiplies the result keeps it whole for its backward pass (Megatron-LM keeps x instead,
    and gathers once more).
    """
    out: Tensor = _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter_sequence(part: Tensor, group: Group) -> Tensor:
    """This rank's tokens of the sum of the ranks' parts (batch, seq, …) -> (batch, seq / n, …)."""
    out: Tensor = _ScatterSequence.apply(part, group)  # type: ignore[no-untyped-call]
    return out


class _CopyToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


class _ReduceFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad, ctx.group), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def check_sequence(seq_len: int, ranks: int) -> None:
    """Raise ValueError where `ranks` cannot share a sequence equally."""
    if seq_len % ranks:
        raise ValueError(
            f"{seq_len=} must be a multiple of the {ranks} ranks that share the sequence, "
            f"for example {max(1, seq_len // ranks) * ranks}"
        )


def all_reduced(x: Tensor, group: Group | None, *, op: Operation = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or what `op` says) over the ranks; x stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    # Every rank sends its x and gets the sum: of a stream b·s·h numbers of 4 bytes (2 in bf16).
    dist.all_reduce(total, op=op, group=group)
    return total


def _gathered(x: Tensor, group: Group) -> Tensor:
    ranks, (batch, seq, *rest) = dist.get_world_size(group), x.shape
    pieces = x.new_empty(ranks * batch, seq, *rest)
    # Every rank sends its tokens to all others: together b·s·h numbers of 4 bytes (2 in bf16).
    dist.all_gather_single(pieces, x.contiguous(), group=group)
    in_order = pieces.view(ranks, batch, seq, *rest).transpose(0, 1)  # (batch, n, seq / n, …)
    return in_order.reshape(batch, ranks * seq, *rest)


def _scattered(part: Tensor, group: Group) -> Tensor:
    ranks, (batch, seq, *rest) = dist.get_world_size(group), part.shape
    check_sequence(seq, ranks)
    pieces = part.reshape(batch, ranks, seq // ranks, *rest).transpose(0, 1).flatten(0, 1)
    mine = part.new_empty(batch, seq // ranks, *rest)
    # Every rank sends each other its part of that one's tokens: b·s·h numbers of 4 bytes, or 2.
    dist.reduce_scatter_single(mine, pieces.contiguous(), group=group)
    return mine
