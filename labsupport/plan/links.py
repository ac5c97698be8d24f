"""What would a collective take on NVLink, PCIe or a network that I do not have?

    roads()["nvlink4"]         # latency, bandwidth one way, and what the bandwidth rests on
    predict_on(roads()["nvlink4"], ring_all_reduce(size_bytes=64e6, world_size=8)).total_s

The bandwidth is the best that somebody measured in one direction; where nobody did, it is the
datasheet's, and the time is a lower bound. A link without a known latency is left out, not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.hardware import LINKS
from labsupport.plan.communication import CollectiveCost, LinkFit, PredictedTime, predict


@dataclass(frozen=True, kw_only=True)
class Road:
    """The two numbers of a link, and where they come from."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    """One direction."""
    basis: str
    """"best published measurement", "datasheet" or "fitted here"."""


def roads() -> dict[str, Road]:
    """All links of `labsupport.hardware` whose latency is known, by their keys."""
    return {
        key: Road(
            name=link.name,
            latency_s=link.latency_s,
            bandwidth_bytes_per_s=link.best_measured_bytes_per_s or link.one_way_bytes_per_s,
            basis="best published measurement" if link.best_measured_bytes_per_s else "datasheet",
        )
        for key, link in LINKS.items()
        if link.latency_s is not None
    }


def road_of_fit(name: str, fit: LinkFit) -> Road:
    """A link that was measured and fitted here, to stand beside the others."""
    return Road(
        name=name,
        latency_s=fit.latency_s,
        bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s,
        basis="fitted here",
    )


def predict_on(road: Road, cost: CollectiveCost) -> PredictedTime:
    """Alpha-beta time of `cost` on `road`."""
    return predict(cost, latency_s=road.latency_s, bandwidth_bytes_per_s=road.bandwidth_bytes_per_s)
