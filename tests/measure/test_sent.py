from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.measure.links import ring_all_reduce
from labsupport.measure.sent import count_sent_bytes
from labsupport.plan.traffic import naive_all_reduce_sent_bytes, ring_all_reduce_sent_bytes

ITEMS = 4 * 300


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def naive_all_reduce(x: torch.Tensor) -> None:
    """Everything to rank 0 and back."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    received = torch.empty_like(x)
    for other in range(1, n):
        dist.recv(received, other)
        x.add_(received)
    for other in range(1, n):
        dist.send(x, other)


def counted(reduce: object) -> tuple[int, dict[int, int], bool]:
    x = torch.arange(ITEMS, dtype=torch.float32) * (dist.get_rank() + 1)
    with count_sent_bytes() as sent:
        reduce(x)  # type: ignore[operator]
    dist.barrier()
    return sent.total_bytes, sent.by_destination, torch.equal(x, torch.arange(ITEMS) * 10.0)


def test_naive_and_ring_send_what_the_formulas_say(four: Ranks) -> None:
    size_bytes = ITEMS * 4
    naive = four.run(counted, naive_all_reduce)
    assert tuple(total for total, _, _ in naive) == naive_all_reduce_sent_bytes(
        size_bytes=size_bytes, world_size=4
    )
    ring = four.run(lambda: counted(lambda x: ring_all_reduce(x, order=range(4))))
    assert tuple(total for total, _, _ in ring) == ring_all_reduce_sent_bytes(
        size_bytes=size_bytes, world_size=4
    )
    assert [list(to) for _, to, _ in ring] == [[1], [2], [3], [0]]
    assert all(right for _, _, right in naive + ring)


def test_every_way_to_send_is_counted_and_the_counter_ends(four: Ranks) -> None:
    def talk() -> tuple[int, int, int, bool]:
        rank = dist.get_rank()
        other = rank ^ 1
        x, y = torch.ones(6, dtype=torch.float16), torch.empty(6, dtype=torch.float16)
        before = dist.ProcessGroup.send
        with count_sent_bytes() as outer:
            with count_sent_bytes() as inner:
                work = dist.isend(x, other)  # 12 bytes
                dist.recv(y, other)
                assert work is not None
                work.wait()
            ops = [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)]
            for request in dist.batch_isend_irecv(ops):  # 12 bytes
                request.wait()
            dist.all_reduce(x)  # not point to point: not counted
        return (
            inner.total_bytes,
            outer.total_bytes,
            outer.messages,
            dist.ProcessGroup.send is before,
        )

    assert four.run(talk) == [(12, 24, 2, True)] * 4


def test_the_counter_ends_after_an_error() -> None:
    before = dist.ProcessGroup.send
    with pytest.raises(KeyError), count_sent_bytes():
        raise KeyError("on purpose")
    assert dist.ProcessGroup.send is before
