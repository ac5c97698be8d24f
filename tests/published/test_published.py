from __future__ import annotations

import pytest

from labsupport import published
from labsupport.plan.communication import fit_latency_bandwidth


def test_every_row_has_a_source_and_consistent_numbers() -> None:
    rows = published.collectives()
    assert len(rows) == 409
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    for row in rows:
        assert row.source
        assert row.ref
        nodes, gpus = map(int, row.topology.split("x"))
        assert nodes * gpus == row.num_gpus
        if row.time_s is not None and row.time_s > 5e-5:  # finer than the times are rounded
            n = row.num_gpus
            bus = factor[row.collective] * (n - 1) / n * row.size_bytes / row.time_s
            assert bus == pytest.approx(row.bus_bandwidth_bytes_per_s, rel=0.03), row


def test_unstated_times_are_none() -> None:
    ring = [row for row in published.collectives() if row.note == "NVLS off"]
    assert [row.time_s for row in ring] == [None]
    assert ring[0].bus_bandwidth_bytes_per_s == 367.6e9


def test_curves_are_labelled_and_sorted() -> None:
    rows = [row for row in published.collectives() if row.collective == "all_reduce"]
    curves = published.curves(rows, at_least_points=3)
    assert "H100, 8 GPUs in 1 node" in curves
    assert "A100, 16 GPUs in 2 nodes" in curves
    assert "H200, 8 GPUs in 1 node, NVLS on" in curves
    assert "H200, 8 GPUs in 1 node, NVLS off" not in curves  # one point
    for curve in curves.values():
        assert [row.size_bytes for row in curve] == sorted(row.size_bytes for row in curve)


def test_a_published_h100_node_fits_the_model() -> None:
    rows = [r for r in published.collectives() if r.gpu == "h100" and r.num_gpus == 8]
    fit = fit_latency_bandwidth([r for r in rows if r.time_s], world_size=8)  # type: ignore[misc]
    assert 330e9 < fit.bandwidth_bytes_per_s < 370e9  # about 350 of NVLink 4's 450 one way
    assert fit.median_relative_error < 0.06


def test_matmul_ceilings_lie_below_the_datasheet() -> None:
    ceilings = published.matmul_ceilings()
    assert {row.gpu for row in ceilings} == {"a100_sxm", "h100_sxm", "gh200", "b200"}
    for row in ceilings:
        assert 0.5 < row.best_measured_flops_per_s / row.datasheet_flops_per_s < 1


def test_sixteen_times_the_gpus_saved_a_fifth_of_the_memory() -> None:
    runs = [run for run in published.training_runs() if run.metric == "peak_memory"]
    peaks = {run.num_gpus: run.value for run in runs}
    assert peaks == {8: 82.4, 128: 67.0}
    assert {run.unit for run in runs} == {"GiB"}
    assert all(run.source and run.ref for run in published.training_runs())
