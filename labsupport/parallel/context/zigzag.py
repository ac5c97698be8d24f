"""Which tokens does each rank of a context-parallel group take?

A causal token looks at all earlier ones, so late tokens are more work than early ones. Cut into n
pieces the last rank computes almost twice the average, and the others wait for it. Zig-zag cuts
into 2n chunks and gives every rank an early and a late one:

    contiguous, n = 4    0 | 1 | 2 | 3             1  2  3  4 blocks of work
    zig-zag,    n = 4    0 7 | 1 6 | 2 5 | 3 4     9  9  9  9 blocks, a quarter as large

    mine = shard_sequence(input_ids, rank, world_size)         # (batch, seq) -> (batch, seq/n)
    positions = zigzag_positions(seq_len, rank, world_size)    # where in the text they stand
    unshard_sequence(parts_of_all_ranks)                       # in reading order again

A `Split` says which chunks a rank holds, in its order, counted in reading order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Split = Callable[[int, int], tuple[int, ...]]
"""(rank, world_size) -> the chunks of that rank."""


def zigzag_chunks(rank: int, world_size: int) -> tuple[int, ...]:
    """Of 2n chunks the r-th from the front and the r-th from the back."""
    return rank, 2 * world_size - 1 - rank


def contiguous_chunks(rank: int, world_size: int) -> tuple[int, ...]:
    """Of n chunks the r-th: simple, and the last rank has the most work."""
    return (rank,)


def zigzag_positions(seq_len: int, rank: int, world_size: int) -> Tensor:
    """Places in the text of this rank's tokens, (seq / n,), for rotary positions."""
    return shard_sequence(torch.arange(seq_len), rank, world_size)


def shard_sequence(
    x: Tensor, rank: int, world_size: int, *, split: Split = zigzag_chunks, dim: int = -1
) -> Tensor:
    """This rank's part of `x` along `dim`, as in (seq,) or (batch, seq).

    Raises ValueError for a sequence that does not divide into the chunks of all ranks.
    """
    mine, seq_len = split(rank, world_size), x.shape[dim]
    num_chunks = world_size * len(mine)
    if seq_len % num_chunks or not seq_len:
        works = max(1, seq_len // num_chunks) * num_chunks
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of {num_chunks}: {len(mine)} chunks for each of "
            f"{world_size} ranks; {works} works"
        )
    chunks = x.chunk(num_chunks, dim=dim)
    return torch.cat([chunks[i] for i in mine], dim=dim)


def unshard_sequence(
    parts: Sequence[Tensor], *, split: Split = zigzag_chunks, dim: int = -1
) -> Tensor:
    """The whole in reading order, from the parts of rank 0, 1, 2, …"""
    placed: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        chunks = split(rank, len(parts))
        placed |= dict(zip(chunks, part.chunk(len(chunks), dim=dim), strict=True))
    return torch.cat([placed[i] for i in sorted(placed)], dim=dim)
