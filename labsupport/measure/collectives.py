"""The nine conversations between ranks, each ready to be checked once and timed often.

Conventions of nccl-tests (doc/PERFORMANCE.md), S being `size_bytes`:

    algorithm_bandwidth = S / time           what the caller gets
    bus_bandwidth = S / time x factor        what the busiest link carries; does not change with n

| collective | S is | factor |
|---|---|---|
| all_reduce | the buffer of each rank | 2(n - 1)/n |
| all_gather | the gathered whole, n times what a rank gives | (n - 1)/n |
| reduce_scatter | the whole that a rank puts in, n times what it keeps | (n - 1)/n |
| all_to_all, gather, scatter | the whole: n chunks | (n - 1)/n |
| broadcast, reduce | the buffer | 1 |
| send_recv | what each rank sends to the next one | 1 |

    case = ALL_REDUCE.prepare(1024, "cpu")   # on every rank, torch.distributed being up
    case.run(); case.check()                 # raises AssertionError where the sums are wrong
    bus_bandwidth(ALL_REDUCE, size_bytes=1024, time_s=1e-4, world_size=2)       # 10.24 MB/s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

ITEM_BYTES = 4
"""Everything is sent as float32; the check uses whole numbers, which are exact in it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Buffers of one collective at one size on this rank, and what to do with them."""

    size_bytes: int
    """S after rounding down to n equal chunks (and up to one number a chunk)."""
    run: Callable[[], object]
    buffers: tuple[torch.Tensor, ...]
    result: torch.Tensor
    expected: torch.Tensor | None
    """None on a rank that gets no result (a reduce or gather away from rank 0)."""

    def check(self) -> None:
        """After exactly one `run`: every number of the result is what it must be."""
        if self.expected is not None and not torch.equal(self.result, self.expected):
            wrong = int((self.result != self.expected).sum())
            raise AssertionError(
                f"rank {dist.get_rank()}: {wrong} of {self.expected.numel()} numbers are wrong "
                f"at {self.size_bytes} bytes"
            )

    def clear(self) -> None:
        """Zero all buffers, so that repeated sums stay finite while they are timed."""
        for buffer in self.buffers:
            buffer.zero_()


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective: its name, its bus factor, and how to set up a case of it."""

    name: str
    bus_factor: Callable[[int], float]
    prepare: Callable[[int, str], Case]
    """(size_bytes, device) -> Case; called on every rank."""


def algorithm_bandwidth(*, size_bytes: float, time_s: float) -> float:
    """Bytes per second that the caller gets: S / time."""
    if time_s <= 0:
        raise ValueError(f"{time_s=} must be above 0; 1e-3 works")
    return size_bytes / time_s


def bus_bandwidth(
    collective: Collective, *, size_bytes: float, time_s: float, world_size: int
) -> float:
    """Bytes per second on the busiest link: algorithm bandwidth x factor of the collective."""
    factor = collective.bus_factor(world_size)
    return algorithm_bandwidth(size_bytes=size_bytes, time_s=time_s) * factor


def all_reduce(size_bytes: int, device: str) -> Case:
    """Every rank gets the sum. Each rank sends 2(n - 1)/n S in a ring."""
    x = _pattern(dist.get_rank(), _items(size_bytes), device)
    return _case(lambda: dist.all_reduce(x), (x,), x, _summed(x.numel(), device))


def all_gather(size_bytes: int, device: str) -> Case:
    """Every rank gets everybody's S/n. Each rank sends (n - 1)/n S in a ring."""
    chunk, whole = _chunk_and_whole(size_bytes, device)
    expected = torch.cat([_pattern(r, chunk.numel(), device) for r in range(_ranks())])
    return _case(lambda: dist.all_gather_single(whole, chunk), (chunk, whole), whole, expected)


def reduce_scatter(size_bytes: int, device: str) -> Case:
    """Rank r gets chunk r of the sum. Each rank sends (n - 1)/n S in a ring."""
    chunk, _ = _chunk_and_whole(size_bytes, device)
    whole = _pattern(dist.get_rank(), chunk.numel() * _ranks(), device)
    expected = _summed(whole.numel(), device).chunk(_ranks())[dist.get_rank()]
    return _case(lambda: dist.reduce_scatter_single(chunk, whole), (chunk, whole), chunk, expected)


def all_to_all(size_bytes: int, device: str) -> Case:
    """Chunk c of rank r becomes chunk r of rank c. Each rank sends n - 1 chunks of S/n."""
    rank, items = dist.get_rank(), _items(size_bytes)
    x, out = _pattern(rank, items, device), torch.zeros(items, device=device)
    expected = torch.cat(
        [_pattern(r, items, device).chunk(_ranks())[rank] for r in range(_ranks())]
    )
    return _case(lambda: dist.all_to_all_single(out, x), (x, out), out, expected)


def broadcast(size_bytes: int, device: str) -> Case:
    """Every rank gets rank 0's buffer of S bytes."""
    x = _pattern(dist.get_rank(), _items(size_bytes), device)
    return _case(lambda: dist.broadcast(x, src=0), (x,), x, _pattern(0, x.numel(), device))


def reduce(size_bytes: int, device: str) -> Case:
    """Rank 0 gets the sum of all buffers of S bytes."""
    x = _pattern(dist.get_rank(), _items(size_bytes), device)
    expected = _summed(x.numel(), device) if dist.get_rank() == 0 else None
    return _case(lambda: dist.reduce(x, dst=0), (x,), x, expected)


def gather(size_bytes: int, device: str) -> Case:
    """Rank 0 gets everybody's S/n; the others send once."""
    chunk, whole = _chunk_and_whole(size_bytes, device)
    root = dist.get_rank() == 0
    into = list(whole.chunk(_ranks())) if root else None
    expected = torch.cat([_pattern(r, chunk.numel(), device) for r in range(_ranks())])
    return _case(
        lambda: dist.gather(chunk, into, dst=0), (chunk, whole), whole, expected if root else None
    )


def scatter(size_bytes: int, device: str) -> Case:
    """Rank r gets chunk r of rank 0's buffer of S bytes."""
    chunk, _ = _chunk_and_whole(size_bytes, device)
    whole = _pattern(0, chunk.numel() * _ranks(), device)
    parts = list(whole.chunk(_ranks())) if dist.get_rank() == 0 else None
    expected = whole.chunk(_ranks())[dist.get_rank()].clone()
    return _case(lambda: dist.scatter(chunk, parts, src=0), (chunk, whole), chunk, expected)


def send_recv(size_bytes: int, device: str) -> Case:
    """Every rank sends S bytes to the next one and receives as many from the one before."""
    rank, n, items = dist.get_rank(), _ranks(), _items(size_bytes)
    x, out = _pattern(rank, items, device), torch.zeros(items, device=device)

    def shift() -> None:
        if n == 1:
            out.copy_(x)
            return
        ops = [
            dist.P2POp(dist.irecv, out, (rank - 1) % n),
            dist.P2POp(dist.isend, x, (rank + 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return _case(shift, (x, out), out, _pattern((rank - 1) % n, items, device))


def _twice_ring(n: int) -> float:
    return 2 * (n - 1) / n


def _once_ring(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


ALL_REDUCE = Collective(name="all_reduce", bus_factor=_twice_ring, prepare=all_reduce)
ALL_GATHER = Collective(name="all_gather", bus_factor=_once_ring, prepare=all_gather)
REDUCE_SCATTER = Collective(name="reduce_scatter", bus_factor=_once_ring, prepare=reduce_scatter)
ALL_TO_ALL = Collective(name="all_to_all", bus_factor=_once_ring, prepare=all_to_all)
BROADCAST = Collective(name="broadcast", bus_factor=_one, prepare=broadcast)
REDUCE = Collective(name="reduce", bus_factor=_one, prepare=reduce)
GATHER = Collective(name="gather", bus_factor=_once_ring, prepare=gather)
SCATTER = Collective(name="scatter", bus_factor=_once_ring, prepare=scatter)
SEND_RECV = Collective(name="send_recv", bus_factor=_one, prepare=send_recv)

COLLECTIVES: dict[str, Collective] = {
    collective.name: collective
    for collective in (
        ALL_REDUCE,
        ALL_GATHER,
        REDUCE_SCATTER,
        ALL_TO_ALL,
        BROADCAST,
        REDUCE,
        GATHER,
        SCATTER,
        SEND_RECV,
    )
}
"""Names for the command line; code passes the objects."""


def _ranks() -> int:
    return dist.get_world_size()


def _items(size_bytes: int) -> int:
    """Numbers in the whole buffer: a multiple of n, at least n."""
    per_chunk = size_bytes // (ITEM_BYTES * _ranks())
    return max(1, per_chunk) * _ranks()


def _pattern(rank: int, items: int, device: str) -> torch.Tensor:
    """Numbers that name their rank and place: (rank + 1) x (1, 2, ..., 7, 1, 2, ...)."""
    return (torch.arange(items, device=device) % 7 + 1).float() * (rank + 1)


def _summed(items: int, device: str) -> torch.Tensor:
    """The sum of all ranks' patterns: n(n + 1)/2 times rank 0's."""
    return _pattern(0, items, device) * (_ranks() * (_ranks() + 1) // 2)


def _chunk_and_whole(size_bytes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's S/n filled with its pattern, and an empty buffer of S."""
    items = _items(size_bytes)
    chunk = _pattern(dist.get_rank(), items // _ranks(), device)
    return chunk, torch.zeros(items, device=device)


def _case(
    run: Callable[[], object],
    buffers: tuple[torch.Tensor, ...],
    result: torch.Tensor,
    expected: torch.Tensor | None,
) -> Case:
    """S is the largest buffer in play."""
    return Case(
        size_bytes=max(buffer.numel() for buffer in buffers) * ITEM_BYTES,
        run=run,
        buffers=buffers,
        result=result,
        expected=expected,
    )
