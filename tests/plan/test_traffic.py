from __future__ import annotations

import pytest

from labsupport.plan.ring import ring_all_reduce_state
from labsupport.plan.traffic import (
    all_to_all_sent_bytes,
    hierarchical_bytes_across,
    naive_all_reduce_sent_bytes,
    ring_all_reduce_sent_bytes,
    ring_bytes_across,
)


def test_who_sends_what_by_hand() -> None:
    assert naive_all_reduce_sent_bytes(size_bytes=1000, world_size=4) == (3000, 1000, 1000, 1000)
    assert ring_all_reduce_sent_bytes(size_bytes=1000, world_size=4) == (1500,) * 4
    assert all_to_all_sent_bytes(size_bytes=1000, world_size=4) == (750,) * 4
    assert naive_all_reduce_sent_bytes(size_bytes=1000, world_size=1) == (0,)


@pytest.mark.parametrize("n", [2, 4, 8, 64, 1024])
def test_claim_a1_a_rank_saturates_and_the_total_grows(n: int) -> None:
    ring = ring_all_reduce_sent_bytes(size_bytes=1024, world_size=n)
    assert max(ring) < 2 * 1024
    assert sum(ring) == sum(naive_all_reduce_sent_bytes(size_bytes=1024, world_size=n))
    assert sum(ring) == 2 * (n - 1) * 1024


def test_bytes_on_the_cable_by_hand() -> None:
    assert ring_bytes_across(size_bytes=1000, node_of_ring=(0, 1, 0, 1)) == 3000
    assert ring_bytes_across(size_bytes=1000, node_of_ring=(0, 0, 1, 1)) == 1500
    assert ring_bytes_across(size_bytes=1000, node_of_ring=(0, 0)) == 0
    assert hierarchical_bytes_across(size_bytes=1000) == 1000


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="1002 bytes work"):
        ring_all_reduce_sent_bytes(size_bytes=1000, world_size=3)
    with pytest.raises(ValueError, match=r"\(0, 0, 1, 1\) works"):
        ring_bytes_across(size_bytes=1, node_of_ring=(0, 2))
    with pytest.raises(ValueError, match="size_bytes=4096 and world_size=4 work"):
        naive_all_reduce_sent_bytes(size_bytes=-1, world_size=4)
    with pytest.raises(ValueError, match="must be at least 0"):
        hierarchical_bytes_across(size_bytes=-1)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_ring_ends_with_every_sum_everywhere(n: int) -> None:
    everybody = frozenset(range(n))
    halfway = ring_all_reduce_state(world_size=n, steps_done=n - 1)
    for rank in range(n):  # after the reduce-scatter, rank r holds the whole sum of chunk r + 1
        whole = [chunk for chunk in range(n) if halfway.holds[rank][chunk] == everybody]
        assert whole == [(rank + 1) % n]
    end = ring_all_reduce_state(world_size=n, steps_done=2 * (n - 1))
    assert all(held == everybody for row in end.holds for held in row)
    assert end.sends == ()
    assert end.sent_share == 2 * (n - 1) / n


def test_ring_states_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="6 works"):
        ring_all_reduce_state(world_size=4, steps_done=7)
    with pytest.raises(ValueError, match="4 works"):
        ring_all_reduce_state(world_size=1, steps_done=0)
