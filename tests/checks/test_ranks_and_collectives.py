"""The checks of notebook 01: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.checks import ranks_and_collectives as check


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, collective_timeout_s=2) as pool:
        yield pool


def test_all_to_all_bytes() -> None:
    assert check.all_to_all_bytes(...).status == "blank"
    assert check.all_to_all_bytes(786432).is_right
    assert "for the rank itself" in check.all_to_all_bytes(2**20).hint
    assert not check.all_to_all_bytes("many").is_right


def test_order_matters() -> None:
    assert check.order_matters(..., ..., ...).status == "blank"
    assert check.order_matters(1.0, 1e8, -1e8).is_right
    assert "alike in size" in check.order_matters(1, 2, 3).hint
    assert "finite" in check.order_matters(3e38, 3e38, 1).hint
    assert not check.order_matters("a", 1, 2).is_right


def exchange(outgoing: torch.Tensor, to: int, arriving: torch.Tensor, source: int) -> None:
    both = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, arriving, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def good_swap(tensor: torch.Tensor, partner: int) -> torch.Tensor:
    received = torch.empty_like(tensor)
    exchange(tensor, partner, received, partner)
    return received


def both_send_first(tensor: torch.Tensor, partner: int) -> torch.Tensor:
    received = torch.empty_like(tensor)
    dist.send(tensor, dst=partner)
    dist.recv(received, src=partner)
    return received


def test_swap(ranks: Ranks) -> None:
    assert check.swap(good_swap, ranks).is_right
    assert check.swap(..., ranks).status == "blank"
    assert "own tensor back" in check.swap(lambda tensor, partner: tensor, ranks).hint
    deadlock = check.swap(both_send_first, ranks)
    assert deadlock.status == "not yet"
    assert "rank 0 waited in send(float32[1000]) to rank 1" in deadlock.hint
    assert "NameError" in check.swap(lambda tensor, partner: undefined, ranks).hint  # noqa: F821


def good_all_gather(piece: torch.Tensor) -> list[torch.Tensor]:
    n, me = dist.get_world_size(), dist.get_rank()
    pieces = [torch.empty_like(piece) for _ in range(n)]
    pieces[me] = piece
    for step in range(n - 1):
        exchange(pieces[(me - step) % n], (me + 1) % n, pieces[(me - step - 1) % n], (me - 1) % n)
    return pieces


def in_order_of_arrival(piece: torch.Tensor) -> list[torch.Tensor]:
    me, n = dist.get_rank(), dist.get_world_size()
    pieces = good_all_gather(piece)
    return [pieces[(me - step) % n] for step in range(n)]


def by_the_library(piece: torch.Tensor) -> list[torch.Tensor]:
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return pieces


def stub(piece: torch.Tensor) -> None: ...


def test_all_gather(ranks: Ranks) -> None:
    assert check.all_gather(good_all_gather, ranks).is_right
    assert check.all_gather(stub, ranks).status == "blank"
    assert "not in rank order" in check.all_gather(in_order_of_arrival, ranks).hint
    assert "from send and recv" in check.all_gather(by_the_library, ranks).hint
    mixed = check.all_gather(lambda piece: [piece, None, "x", piece], ranks)
    assert mixed.status == "not yet"  # a wrong answer never raises
    assert "1 pieces" in check.all_gather(lambda piece: [piece], ranks).hint
    assert "entry 0" in check.all_gather(lambda piece: [piece + 100] * 4, ranks).hint


def good_tree(tensor: torch.Tensor) -> None:
    me, n, have_it = dist.get_rank(), dist.get_world_size(), 1
    while have_it < n:
        if me < have_it:
            dist.send(tensor, dst=me + have_it)
        elif me < 2 * have_it:
            dist.recv(tensor, src=me - have_it)
        have_it *= 2


def rank_0_sends_to_all(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=0)


def test_tree_broadcast(ranks: Ranks) -> None:
    assert check.tree_broadcast(good_tree, ranks).is_right
    assert check.tree_broadcast(stub, ranks).status == "blank"
    assert "sends 3 times" in check.tree_broadcast(rank_0_sends_to_all, ranks).hint
    assert "does not hold" in check.tree_broadcast(lambda tensor: tensor.zero_(), ranks).hint
    library = check.tree_broadcast(lambda tensor: dist.broadcast(tensor, src=0), ranks)
    assert "from send and recv" in library.hint
