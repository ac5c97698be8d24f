from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from labsupport import RankError, Ranks
from labsupport.measure.bench import bench_collectives, size_text, sizes
from labsupport.measure.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    COLLECTIVES,
    Case,
    all_reduce,
    bus_bandwidth,
)
from labsupport.plan.communication import fit_latency_bandwidth


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_bus_bandwidth_by_hand() -> None:
    # 1 GB in 10 ms is 100 GB/s for the caller; 8 ranks in a ring carry 7/4 of it.
    found = bus_bandwidth(ALL_REDUCE, size_bytes=1e9, time_s=0.01, world_size=8)
    assert found == pytest.approx(175e9)
    found = bus_bandwidth(ALL_GATHER, size_bytes=1e9, time_s=0.01, world_size=8)
    assert found == pytest.approx(87.5e9)
    assert bus_bandwidth(BROADCAST, size_bytes=1e9, time_s=0.01, world_size=8) == 100e9
    with pytest.raises(ValueError, match="1e-3 works"):
        bus_bandwidth(BROADCAST, size_bytes=1, time_s=0, world_size=2)


def test_sizes() -> None:
    assert sizes() == [2**power for power in range(10, 27)]
    assert sizes(min_bytes=1000, max_bytes=5000, step_factor=4) == [1000, 4000]
    assert size_text(1536) == "1.5 KiB"
    with pytest.raises(ValueError, match="1024, 67108864 and 2 work"):
        sizes(min_bytes=2048, max_bytes=1024)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_checked_and_timed(two: Ranks, name: str) -> None:
    table = bench_collectives(
        two,
        collectives=(COLLECTIVES[name],),
        min_bytes=1000,
        max_bytes=9000,
        step_factor=3,
        budget_s=0.01,
    )
    assert [row.size_bytes for row in table.rows] == [1000, 3000, 9000]
    for row in table.rows:
        assert row.collective == name
        assert row.world_size == 2
        assert 0 < row.fastest_s <= row.time_s <= row.slowest_s
        assert row.algorithm_bandwidth_bytes_per_s == pytest.approx(row.size_bytes / row.time_s)


def test_three_ranks_round_the_size_down_to_equal_chunks() -> None:
    everything = tuple(COLLECTIVES.values())
    with Ranks(3) as three:
        table = bench_collectives(
            three, collectives=everything, min_bytes=1024, max_bytes=1024, budget_s=0.01
        )
    assert {row.size_bytes for row in table.rows} == {1020}
    assert [row.collective for row in table.rows] == list(COLLECTIVES)


def test_a_wrong_sum_is_found(two: Ranks) -> None:
    def forgets(size_bytes: int, device: str) -> Case:
        return replace(all_reduce(size_bytes, device), run=lambda: None)

    broken = replace(ALL_REDUCE, prepare=forgets)
    with pytest.raises(RankError, match="numbers are wrong"):
        bench_collectives(two, collectives=(broken,), max_bytes=1024)


@pytest.mark.slow
def test_1_kib_to_64_mib_takes_seconds_and_fits_a_line(two: Ranks) -> None:
    start = time.monotonic()
    table = bench_collectives(two)
    assert time.monotonic() - start < 25  # 7 s on two idle cores
    assert [row.size_bytes for row in table.rows] == sizes()
    assert table.title == f"measured: 2 ranks, gloo on {two.device}"
    fit = fit_latency_bandwidth(table.rows, world_size=2)
    assert 1e7 < fit.bandwidth_bytes_per_s < 1e11
    assert fit.median_relative_error < 1
    loaded = json.loads(table.to_json())
    assert loaded["label"] == "measured"
    assert loaded["rows"][0]["size_bytes"] == 1024
    assert "1 KiB" in repr(table)
    assert table._repr_html_().count("<tr>") == 18


def test_bad_budget(two: Ranks) -> None:
    with pytest.raises(ValueError, match=r"0\.2 works"):
        bench_collectives(two, budget_s=0)


def test_case_outside_ranks_says_what_is_wrong() -> None:
    case = Case(
        size_bytes=8,
        run=lambda: None,
        buffers=(),
        result=torch.zeros(2),
        expected=None,
    )
    case.check()  # no result on this rank, so nothing to compare
