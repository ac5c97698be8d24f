"""Broken on purpose: each mistake of a ring makes the proof of equality fail.

The mistakes are made on the ranks, one at a time, by replacing a function of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labsupport import Ranks
from labsupport.config import ParallelConfig
from labsupport.model import Llama, causal_attention
from labsupport.parallel.context import (
    blockwise,
    context_parallel,
    contiguous_chunks,
    ring,
    ring_attention,
    shard_sequence,
)
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.layout import Layout
from labsupport.train.proof import Proof, RankProof, prove_on_rank

Mistake = Callable[[], AbstractContextManager[Any]]


def averaged(model: Llama, layout: Layout) -> Any:
    assert layout.mesh is not None
    return data_parallel(context_parallel(model, layout.mesh["cp"]), group=layout.loss_group)


def averaged_over_the_others_only(model: Llama, layout: Layout) -> Any:
    """Data-parallel ranks average, the ranks that share a sequence do not."""
    assert layout.mesh is not None
    group = layout.mesh["dp_replicate"].get_group()
    return data_parallel(context_parallel(model, layout.mesh["cp"]), group=group)


def prove_with(mistake: Mistake, wrap: Any) -> RankProof:
    """On a rank of two that share a sequence: the proof, with a mistake in the code."""
    with mistake():
        return prove_on_rank(wrap, parallel=ParallelConfig(context_parallel_size=2))


def proof(ranks: Ranks, mistake: Mistake = nullcontext, wrap: Any = averaged) -> Proof:
    return Proof(tuple(ranks.run(prove_with, mistake, wrap)))


# ---- the mistakes --------------------------------------------------------------------------------


def sums_not_rescaled() -> AbstractContextManager[Any]:
    """A larger maximum turns up, and what was added up before stays as it was."""

    def add(self: blockwise.RunningSoftmax, scores: Tensor, value: Tensor) -> None:
        self.largest = torch.maximum(self.largest, scores.amax(-1))
        weights = torch.exp(scores - self.largest[..., None])
        self.out = self.out + torch.einsum("bhgqk,bhkd->bhgqd", weights, value)
        self.total = self.total + weights.sum(-1)

    return patch.object(blockwise.RunningSoftmax, "add", add)


def no_maximum() -> AbstractContextManager[Any]:
    """exp(s) as it is: the same numbers, until one of them is too large."""

    def add(self: blockwise.RunningSoftmax, scores: Tensor, value: Tensor) -> None:
        self.largest = torch.zeros_like(self.total)
        weights = torch.exp(scores)
        self.out = self.out + torch.einsum("bhgqk,bhkd->bhgqd", weights, value)
        self.total = self.total + weights.sum(-1)

    return patch.object(blockwise.RunningSoftmax, "add", add)


def positions_count_from_zero() -> AbstractContextManager[Any]:
    """Every rank believes that its part is the beginning of the text."""

    def positions(self: Layout, seq_len: int, *, device: torch.device) -> Tensor:
        return torch.arange(seq_len // self.cp_size, device=device)

    return patch.object(Layout, "positions", positions)


def parts_cut_in_one_piece() -> AbstractContextManager[Any]:
    """Tokens are contiguous, the masks those of zig-zag."""

    def cut(self: Layout, tensor: Tensor) -> Tensor:
        return shard_sequence(tensor, self.cp_rank, self.cp_size, split=contiguous_chunks)

    return patch.object(Layout, "shard_sequence", cut)


def visiting_chunks_mixed_up() -> AbstractContextManager[Any]:
    """The early chunk of k is taken for the late one."""
    blocks = ring.Ring.blocks

    def mixed(self: ring.Ring, hop: int) -> Iterator[tuple[int, int, bool]]:
        for i, j, is_diagonal in blocks(self, hop):
            yield i, self.num_chunks - 1 - j, is_diagonal

    return patch.object(ring.Ring, "blocks", mixed)


def diagonal_not_masked() -> AbstractContextManager[Any]:
    """Tokens see the rest of their own chunk."""
    scores = blockwise.scores

    def open_scores(query: Tensor, key: Tensor, *, is_diagonal: bool) -> Tensor:
        return scores(query, key, is_diagonal=False)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(ring, "scores", open_scores),
            patch.object(blockwise, "scores", open_scores),
        ):
            yield

    return both()


def one_hop_skipped() -> AbstractContextManager[Any]:
    """The last part to come round is not looked at."""
    travel = ring.Ring.travel

    def shorter(self: ring.Ring, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        for hop, here in travel(self, part):
            if hop < self.size - 1:
                yield hop, here

    return patch.object(ring.Ring, "travel", shorter)


def gradients_not_sent_home() -> AbstractContextManager[Any]:
    """dk and dv stay on the rank before the one that they belong to."""
    pass_on, backward = ring.Ring.pass_on, ring.ring_backward
    hops = 0

    def counted(self: ring.Ring, part: Tensor) -> ring.Arrival:
        nonlocal hops
        hops += 1
        is_last_of_a_backward = hops == 2 * self.size - 1
        return ring.Arrival(part) if is_last_of_a_backward else pass_on(self, part)

    def restarted(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal hops
        hops = 0
        gradients = backward(*args)
        hops = -(10**9)  # hops of a forward pass do not count
        return gradients

    @contextmanager
    def both() -> Iterator[None]:
        nonlocal hops
        hops = -(10**9)
        with (
            patch.object(ring.Ring, "pass_on", counted),
            patch.object(ring, "ring_backward", restarted),
        ):
            yield

    return both()


MISTAKES: list[Mistake] = [
    sums_not_rescaled,
    positions_count_from_zero,
    parts_cut_in_one_piece,
    visiting_chunks_mixed_up,
    diagonal_not_masked,
    one_hop_skipped,
    gradients_not_sent_home,
]


def test_without_a_mistake_the_proof_holds(two: Ranks) -> None:
    assert proof(two).is_equal


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_makes_the_proof_fail(two: Ranks, mistake: Mistake) -> None:
    found = proof(two, mistake)
    assert not any(rank.is_equal for rank in found.ranks), found


def test_weights_averaged_without_the_context_parallel_ranks(two: Ranks) -> None:
    assert not proof(two, wrap=averaged_over_the_others_only).is_equal


def largest_error(mistake: Mistake, scale: float) -> float:
    """Of the ring's output, with queries `scale` times as large; NaN is infinite."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) for _ in range(3))
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mine = [shard_sequence(x, rank, 2, dim=-2) for x in (scale * q, k, v)]
    whole = shard_sequence(causal_attention(scale * q, k, v), rank, 2, dim=-2)
    with mistake():
        difference = (ring_attention(*mine, group=group) - whole).abs().max()
    return float(difference.nan_to_num(nan=torch.inf))


def test_without_the_maximum_small_scores_are_right_and_large_ones_overflow(two: Ranks) -> None:
    assert max(two.run(largest_error, no_maximum, 1.0)) < 1e-5
    assert max(two.run(largest_error, no_maximum, 200.0)) == torch.inf
    assert max(two.run(largest_error, nullcontext, 200.0)) < 1e-4
