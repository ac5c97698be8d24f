from __future__ import annotations

import pytest

from labsupport.hardware import LINKS
from labsupport.plan.communication import LinkFit, ring_all_reduce
from labsupport.plan.links import predict_on, road_of_fit, roads


def test_a_link_without_a_known_latency_is_left_out() -> None:
    assert set(roads()) == {key for key, link in LINKS.items() if link.latency_s is not None}


def test_measured_bandwidth_is_used_where_there_is_one() -> None:
    nvlink4, pcie5 = roads()["nvlink4"], roads()["pcie5-x16"]
    assert nvlink4.bandwidth_bytes_per_s == LINKS["nvlink4"].best_measured_bytes_per_s
    assert nvlink4.basis == "best published measurement"
    assert pcie5.bandwidth_bytes_per_s == LINKS["pcie5-x16"].one_way_bytes_per_s
    assert pcie5.basis == "datasheet"


def test_a_fit_becomes_a_road() -> None:
    fit = LinkFit(
        collective=ring_all_reduce,
        world_size=2,
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        median_relative_error=0.1,
        worst_relative_error=0.2,
        num_points=17,
    )
    road = road_of_fit("here", fit)
    cost = ring_all_reduce(size_bytes=1e6, world_size=2)
    assert predict_on(road, cost).total_s == pytest.approx(2e-4 + 1e-3)
    assert road.basis == "fitted here"
