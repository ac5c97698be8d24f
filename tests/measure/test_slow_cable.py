"""The emulated cable: it counts what crosses, takes the time for it, and says that it is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.measure import slow_cable
from labsupport.measure.bench import bench_collectives
from labsupport.measure.links import RING_ALL_REDUCE, compare_routes
from labsupport.measure.nodes import TwoNodes, can_make_nodes
from labsupport.measure.slow_cable import emulated_nodes, two_nodes_or_emulation


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool


def test_routes_put_on_the_emulated_cable_what_the_formulas_say(four: Ranks) -> None:
    size_bytes = 2**20
    with emulated_nodes(four, rate_bits_per_s=5 * 10**8) as nodes:
        table = compare_routes(nodes, size_bytes=size_bytes, repeats=1)
    assert [row.cable_over_size for row in table.rows] == [3.0, 1.5, 1.0]  # no headers here
    for row in table.rows:
        assert row.time_s >= row.cable_bytes / 62.5e6
    assert table.label == "emulated"
    assert "a pause of bytes / 0.5 Gb/s" in table._repr_html_()


def test_a_ring_crawls_at_the_emulated_rate() -> None:
    with Ranks(2) as pair, emulated_nodes(pair, rate_bits_per_s=10**9) as nodes:
        assert (nodes.world_size, nodes.processes_per_node) == (2, 1)
        table = bench_collectives(
            nodes, collectives=(RING_ALL_REDUCE,), min_bytes=2**22, max_bytes=2**22
        )
        (row,) = table.rows
        assert table.title == "emulated: 2 ranks, gloo on cpu"
        assert 0.03e9 < row.bus_bandwidth_bytes_per_s <= 0.125e9
        assert "1 Gb/s for each message across (no namespaces" in nodes.how


def test_sends_are_fast_again_afterwards(four: Ranks) -> None:
    def is_the_librarys_own() -> bool:
        return "slow_send" not in repr(vars(dist.ProcessGroup)["send"])

    with emulated_nodes(four) as nodes:
        assert nodes.run(is_the_librarys_own) == [False] * 4
        with pytest.raises(Exception, match="on purpose"):
            nodes.run(raise_on_purpose)
    assert four.run(is_the_librarys_own) == [True] * 4
    assert not nodes.folder.exists()


def raise_on_purpose() -> None:
    raise RuntimeError("on purpose")


def test_namespaces_are_taken_where_they_are_allowed(
    four: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes_or_emulation(four) as nodes:
        assert isinstance(nodes, TwoNodes) is (can_make_nodes() is None)
        assert nodes.processes_per_node == 2
    monkeypatch.setattr(slow_cable, "can_make_nodes", lambda: "needs root")
    with two_nodes_or_emulation(four) as nodes:
        assert isinstance(nodes, slow_cable.EmulatedNodes)
        assert nodes.reason == "needs root"
        total = nodes.run(lambda x: dist.all_reduce(x) or x.item(), torch.ones(1), deadline_s=20)
        assert total == [4.0] * 4


def test_odd_numbers_are_refused() -> None:
    with Ranks(3) as three, pytest.raises(ValueError, match="must be even"), emulated_nodes(three):
        pass
    with (
        Ranks(2) as pair,
        pytest.raises(ValueError, match=r"4 and 10\*\*9 work"),
        emulated_nodes(pair, rate_bits_per_s=10),
    ):
        pass
