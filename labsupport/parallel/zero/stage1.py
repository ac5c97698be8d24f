"""ZeRO-1: why should every rank keep the moments of all weights?

    rank r keeps      all weights, all gradients, 1/n of the optimizer's state
    after backward    reduce-scatter: my rows of the mean gradient
    after the step    all-gather: the rows that the others have updated

    model = zero1(Llama(config))
    optimizer = build_optimizer(model, train_config)    # after: the parameters are shards now

An all-reduce is a reduce-scatter and an all-gather (Rajbhandari et al., 2020). DDP calls one after
the other on gradients; here the optimizer's step lies in between: the bytes are DDP's.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from labsupport.parallel.zero.moments import Sharding
from labsupport.parallel.zero.shards import Piece


class Zero1(Sharding):
    """The optimizer sees this rank's rows of every weight, and of its gradient."""

    keeps_whole = True

    def gather(self, piece: Piece) -> None:
        """Before a forward, if an optimizer may have changed the rows: put them together."""
        mine = piece.rows_to_send()  # (rows_per_rank, …)
        if piece.is_split:
            # Each rank sends its rows to every other: (n-1)/n of the whole weight's bytes.
            dist.all_gather_single(piece.buffer, mine, group=self.group)
        else:
            piece.buffer.copy_(mine)  # nothing to send: every rank has made the same step

    def exchange(self, piece: Piece) -> None:
        """After the last backward: add up the gradients of all ranks, keep the mean of my rows."""
        gradient = piece.gradient_to_send().div_(self.num_ranks)  # (n · rows_per_rank, …)
        if piece.is_split:
            piece.received = self.room_for(piece.own_rows(gradient))
            # Each rank sends every other one its rows: (n-1)/n of the whole gradient's bytes.
            dist.reduce_scatter_single(piece.received, gradient, group=self.group)
        else:
            # Too few rows to split: 2(n-1)/n of a few bytes.
            dist.all_reduce(gradient, group=self.group)
            piece.received = gradient

    def room_for(self, rows: Tensor) -> Tensor:
        """Where the mean of `rows` goes: in their place in the whole gradient, which stays."""
        return rows
