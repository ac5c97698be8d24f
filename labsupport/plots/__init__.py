"""Result in, matplotlib Figure out. One look, one width, no pyplot.

    from labsupport import plots
    plots.ring_step(world_size=4, step=1)
    plots.bandwidth_curves({"2 ranks here": table.rows})

| question | picture |
|---|---|
| what does a collective do? | broadcast, scatter, gather, all_reduce, ..., collectives_table |
| who holds what in a ring? | ring_step |
| which way between two nodes? | two_node_routes |
| who sends how much? | bytes_per_rank, bytes_by_world_size, route_bars |
| how fast is the road? | bandwidth_curves, algorithm_and_bus_bandwidth, latency_bandwidth_fit |
| what decides on another road? | link_time |
| what joins my ranks? | topology |
| who reads what in a data-parallel step? | data_parallel_step |
| do the curves coincide? | loss_curves |
"""

from labsupport.plots.bars import bytes_by_world_size, bytes_per_rank, route_bars
from labsupport.plots.curves import (
    algorithm_and_bus_bandwidth,
    bandwidth_curves,
    latency_bandwidth_fit,
    loss_curves,
)
from labsupport.plots.links import link_time
from labsupport.plots.machine import topology
from labsupport.plots.pictures import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    collectives_table,
    gather,
    reduce_scatter,
    scatter,
    send_recv,
)
from labsupport.plots.replicas import data_parallel_step
from labsupport.plots.ring import ring_step
from labsupport.plots.routes import two_node_routes
from labsupport.plots.style import LabFigure

__all__ = [
    "LabFigure",
    "algorithm_and_bus_bandwidth",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bandwidth_curves",
    "broadcast",
    "bytes_by_world_size",
    "bytes_per_rank",
    "collectives_table",
    "data_parallel_step",
    "gather",
    "latency_bandwidth_fit",
    "link_time",
    "loss_curves",
    "reduce_scatter",
    "ring_step",
    "route_bars",
    "scatter",
    "send_recv",
    "topology",
    "two_node_routes",
]
