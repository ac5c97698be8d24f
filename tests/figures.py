"""One call of every picture, with small made-up results, for tests and for looking at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labsupport import plots, published
from labsupport.measure.topology import cpu_topology, parse_nvidia_smi_topo
from labsupport.plan.communication import fit_latency_bandwidth, predict, ring_all_reduce
from labsupport.plan.links import roads
from labsupport.plan.traffic import naive_all_reduce_sent_bytes, ring_all_reduce_sent_bytes
from labsupport.plots import LabFigure


@dataclass(frozen=True)
class Row:
    """What the plots need of a row of measure.bench."""

    size_bytes: int
    time_s: float
    world_size: int = 2

    @property
    def algorithm_bandwidth_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s

    @property
    def bus_bandwidth_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s * 2 * (self.world_size - 1) / self.world_size


@dataclass(frozen=True)
class RouteRow:
    """What the plots need of a row of measure.links."""

    route: str
    size_bytes: int
    time_s: float
    cable_bytes: int


def rows(world_size: int = 2, wobble: float = 0.25) -> list[Row]:
    """Times of a link of 150 us and 1.2 GB/s, with some noise."""
    found = []
    for power in range(10, 27):
        cost = ring_all_reduce(size_bytes=2**power, world_size=world_size)
        time_s = predict(cost, latency_s=150e-6, bandwidth_bytes_per_s=1.2e9).total_s
        noise = 1 + wobble * math.sin(3.0 * power)
        found.append(Row(2**power, time_s * noise, world_size))
    return found


def nvidia_topo(name: str) -> str:
    """Text as of `nvidia-smi topo -m`."""
    return (Path(__file__).parent / "measure" / f"topo_{name}.txt").read_text()


def _published() -> dict[str, tuple[published.PublishedCollective, ...]]:
    chosen = [row for row in published.collectives() if row.collective == "all_reduce"]
    wanted = ("H100, 8", "A100, 8 GPUs in 2", "A100, 4 GPUs in 1", "H200, 8")
    curves = published.curves(chosen, at_least_points=3)
    return {label: c for label, c in curves.items() if label.startswith(wanted)}


def _losses(shift: float = 0.0) -> list[float]:
    return [7.6 * math.exp(-step / 25) + 2.4 + shift * math.sin(step) for step in range(80)]


S = 2**20
FIGURES: dict[str, Callable[[], LabFigure]] = {
    "loss": lambda: plots.loss_curves({"1 process": _losses(), "2 ranks": _losses(1e-6)}),
    "loss_apart": lambda: plots.loss_curves({"1 process": _losses(), "seed changed": _losses(0.3)}),
    "loss_one": lambda: plots.loss_curves({"1 process": _losses()}),
    "bandwidth_here": lambda: plots.bandwidth_curves({"2 ranks here": rows()}),
    "bandwidth": lambda: plots.bandwidth_curves({"2 ranks here": rows()}, published=_published()),
    "algorithm_and_bus": lambda: plots.algorithm_and_bus_bandwidth({2: rows(2), 4: rows(4)}),
    "fit": lambda: plots.latency_bandwidth_fit(rows(), fit_latency_bandwidth(rows(), world_size=2)),
    "topology_laptop": lambda: plots.topology(cpu_topology(allowed=[0, 1])),
    "topology_16_cores": lambda: plots.topology(cpu_topology(allowed=range(16))),
    "topology_hgx": lambda: plots.topology(parse_nvidia_smi_topo(nvidia_topo("eight_gpus"))),
    "topology_four": lambda: plots.topology(parse_nvidia_smi_topo(nvidia_topo("four_gpus"))),
    "topology_one_gpu": lambda: plots.topology(parse_nvidia_smi_topo(nvidia_topo("one_gpu"))),
    "broadcast": plots.broadcast,
    "scatter": plots.scatter,
    "gather": plots.gather,
    "all_gather": plots.all_gather,
    "all_reduce": plots.all_reduce,
    "reduce_scatter": plots.reduce_scatter,
    "all_to_all": plots.all_to_all,
    "send_recv": plots.send_recv,
    "all_reduce_2": lambda: plots.all_reduce(world_size=2),
    "all_to_all_8": lambda: plots.all_to_all(world_size=8),
    "collectives_table": plots.collectives_table,
    "data_parallel_2": plots.data_parallel_step,
    "data_parallel_8": lambda: plots.data_parallel_step(world_size=8, global_batch_size=64),
    "ring_2_0": lambda: plots.ring_step(world_size=2, step=0),
    "ring_4_0": lambda: plots.ring_step(world_size=4, step=0),
    "ring_4_2": lambda: plots.ring_step(world_size=4, step=2),
    "ring_4_6": lambda: plots.ring_step(world_size=4, step=6),
    "ring_8_5": lambda: plots.ring_step(world_size=8, step=5),
    "bytes_per_rank": lambda: plots.bytes_per_rank(
        {
            "naive": naive_all_reduce_sent_bytes(size_bytes=S, world_size=4),
            "ring": ring_all_reduce_sent_bytes(size_bytes=S, world_size=4),
        },
        size_bytes=S,
        predicted={
            "naive": naive_all_reduce_sent_bytes(size_bytes=S, world_size=4),
            "ring": ring_all_reduce_sent_bytes(size_bytes=S, world_size=4),
        },
    ),
    "bytes_by_world_size": lambda: plots.bytes_by_world_size(
        (2, 3, 4, 6, 8),
        counted={n: ring_all_reduce_sent_bytes(size_bytes=24 * S, world_size=n) for n in (2, 4)},
        size_bytes=24 * S,
    ),
    "two_node_routes": plots.two_node_routes,
    "routes": lambda: plots.route_bars(
        [
            RouteRow("ring, every hop crosses", 4 * S, 0.113, 12 * S),
            RouteRow("ring, nodes side by side", 4 * S, 0.069, 6 * S),
            RouteRow("hierarchy", 4 * S, 0.047, 4 * S),
        ]
    ),
    "link_nvlink": lambda: plots.link_time(
        roads()["nvlink4"], ring_all_reduce, name="all_reduce", world_size=8, size_bytes=2**26
    ),
    "link_small": lambda: plots.link_time(
        roads()["ethernet-100"], ring_all_reduce, name="all_reduce", world_size=64, size_bytes=2**12
    ),
}
