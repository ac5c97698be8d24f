from __future__ import annotations

import pytest

from labsupport.measure.collectives import COLLECTIVES as MEASURED
from labsupport.plan.communication import (
    COLLECTIVES,
    TimedSize,
    crossover_bytes,
    fit_latency_bandwidth,
    naive_all_reduce,
    predict,
    ring_all_reduce,
    tree_all_reduce,
    tree_broadcast,
)


def test_ring_by_hand() -> None:
    cost = ring_all_reduce(size_bytes=64e6, world_size=8)
    assert cost.steps == 14
    assert cost.link_bytes == 112e6
    time = predict(cost, latency_s=3e-6, bandwidth_bytes_per_s=450e9)
    assert time.latency_s == pytest.approx(42e-6)
    assert time.transfer_s == pytest.approx(112e6 / 450e9)
    assert time.total_s == pytest.approx(290.9e-6, rel=1e-3)
    assert time.dominant == "bandwidth"


def test_trees_and_naive_by_hand() -> None:
    assert [tree_broadcast(size_bytes=1, world_size=n).steps for n in (1, 2, 3, 4, 5, 8, 9)] == [
        0, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert tree_all_reduce(size_bytes=10, world_size=8).link_bytes == 60
    assert naive_all_reduce(size_bytes=10, world_size=4).link_bytes == 60


def test_small_messages_are_latency_and_a_tree_beats_the_ring() -> None:
    link = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    ring = predict(ring_all_reduce(size_bytes=1024, world_size=64), **link)
    tree = predict(tree_all_reduce(size_bytes=1024, world_size=64), **link)
    assert ring.dominant == "latency"
    assert tree.total_s < ring.total_s / 5


@pytest.mark.parametrize(
    ("planned", "measured"),
    [(n, n) for n in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")],
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_link_bytes_are_the_bus_factor_of_the_benchmark(
    planned: str, measured: str, world_size: int
) -> None:
    cost = COLLECTIVES[planned](size_bytes=1.0, world_size=world_size)
    assert cost.link_bytes == pytest.approx(MEASURED[measured].bus_factor(world_size))


def test_one_rank_sends_nothing() -> None:
    for name, collective in COLLECTIVES.items():
        if name != "send / recv":
            cost = collective(size_bytes=100.0, world_size=1)
            assert (cost.steps, cost.link_bytes) == (0, 0), name


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_the_fit_finds_the_link_that_made_the_points(world_size: int) -> None:
    points = []
    for power in range(10, 27):
        cost = ring_all_reduce(size_bytes=2.0**power, world_size=world_size)
        time = predict(cost, latency_s=25e-6, bandwidth_bytes_per_s=3e9)
        points.append(TimedSize(size_bytes=2.0**power, time_s=time.total_s))
    fit = fit_latency_bandwidth(points, world_size=world_size)
    assert fit.latency_s == pytest.approx(25e-6)
    assert fit.bandwidth_bytes_per_s == pytest.approx(3e9)
    assert fit.worst_relative_error < 1e-9
    assert fit.num_points == 17
    # At the crossover both terms are equal: n x latency x bandwidth for a ring.
    assert fit.crossover_bytes == pytest.approx(world_size * 25e-6 * 3e9)
    there = fit.predict(size_bytes=fit.crossover_bytes)
    assert there.latency_s == pytest.approx(there.transfer_s)


def test_small_sizes_count() -> None:
    """Noise of 20% on one 64 MiB point must not move the latency; unweighted it would by 100x."""
    sizes = [2.0**power for power in range(10, 27)]
    times = [25e-6 + size / 3e9 for size in sizes]
    times[-1] *= 1.2
    points = [TimedSize(size_bytes=s, time_s=t) for s, t in zip(sizes, times, strict=True)]
    fit = fit_latency_bandwidth(points, collective=COLLECTIVES["send / recv"], world_size=2)
    assert fit.latency_s == pytest.approx(25e-6, rel=0.05)
    assert 0.1 < fit.worst_relative_error < 0.2
    assert "typical error" in str(fit)
    assert "0x" not in repr(fit)  # nbval compares it


def test_a_fit_never_gives_a_negative_latency() -> None:
    points = [TimedSize(size_bytes=s, time_s=s**1.2 * 1e-10) for s in (1e3, 1e5, 1e7)]
    assert fit_latency_bandwidth(points, world_size=2).latency_s == 0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1024, 1e-4)], "two numbers need two sizes"),
        ([(1024, 1e-4), (2048, 0.0)], "cannot be fitted"),
        ([(1024, 1e-3), (2048, 1e-4)], "do not grow"),
    ],
)
def test_points_that_cannot_be_fitted(points: list[tuple[float, float]], message: str) -> None:
    rows = [TimedSize(size_bytes=size, time_s=time) for size, time in points]
    with pytest.raises(ValueError, match=message):
        fit_latency_bandwidth(rows, world_size=2)


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match=r"size_bytes=-1 .* world_size=8 work"):
        ring_all_reduce(size_bytes=-1, world_size=2)
    with pytest.raises(ValueError, match="latency_s=5e-6"):
        predict(ring_all_reduce(size_bytes=1, world_size=2), latency_s=0, bandwidth_bytes_per_s=0)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        crossover_bytes(ring_all_reduce, world_size=1, latency_s=1, bandwidth_bytes_per_s=1)
    rows = [TimedSize(size_bytes=s, time_s=s) for s in (1.0, 2.0)]
    with pytest.raises(ValueError, match="at least 2 ranks"):
        fit_latency_bandwidth(rows, world_size=1)
