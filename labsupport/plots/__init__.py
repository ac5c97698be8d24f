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
| where do the bytes of a step go? | memory_lifetimes, memory_timeline, memory_bars |
| what hides a message, and what waits for one? | step_traces |
| who holds what of the states, and what travels instead? | sharding_stages, sharding_ladder, |
| | exchanged_by_stage, weights_over_step |
| what is forgotten, and at what price? | activation_lifetimes, segment_peaks, operator_shares, |
| | memory_against_time |
| when do the buckets leave? | bucket_size |
| what did the tokens buy? | by_tokens |
| who owns which part of a layer? | split_matrix, split_matrices, split_heads, sequence_parallel |
| … and of a causal attention? | causal_shares |
| does tensor parallelism pay on this link? | tensor_parallel_link, step_bars |
| which numbers does a type have? | number_formats, number_line, running_sums |
| what does a narrow type do in training? | scaler_trace, bytes_by_type, sum_errors, rates_by_type |
"""

from labsupport.plots.bars import bytes_by_world_size, bytes_per_rank, route_bars
from labsupport.plots.curves import (
    algorithm_and_bus_bandwidth,
    bandwidth_curves,
    latency_bandwidth_fit,
    loss_curves,
)
from labsupport.plots.gradient_sync import bucket_size
from labsupport.plots.links import link_time
from labsupport.plots.machine import topology
from labsupport.plots.memory import memory_bars, memory_lifetimes, memory_timeline
from labsupport.plots.number_formats import number_formats, number_line, running_sums
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
from labsupport.plots.precision import bytes_by_type, rates_by_type, scaler_trace, sum_errors
from labsupport.plots.recompute import (
    activation_lifetimes,
    memory_against_time,
    operator_shares,
    segment_peaks,
)
from labsupport.plots.replicas import data_parallel_step
from labsupport.plots.ring import ring_step
from labsupport.plots.routes import two_node_routes
from labsupport.plots.sharding import (
    exchanged_by_stage,
    sharding_ladder,
    sharding_stages,
    weights_over_step,
)
from labsupport.plots.style import LabFigure
from labsupport.plots.tensor_parallel import (
    causal_shares,
    sequence_parallel,
    split_heads,
    split_matrices,
    split_matrix,
)
from labsupport.plots.tensor_parallel_time import step_bars, tensor_parallel_link
from labsupport.plots.tokens import by_tokens
from labsupport.plots.trace import step_traces

__all__ = [
    "LabFigure",
    "activation_lifetimes",
    "algorithm_and_bus_bandwidth",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bandwidth_curves",
    "broadcast",
    "bucket_size",
    "by_tokens",
    "bytes_by_type",
    "bytes_by_world_size",
    "bytes_per_rank",
    "causal_shares",
    "collectives_table",
    "data_parallel_step",
    "exchanged_by_stage",
    "gather",
    "latency_bandwidth_fit",
    "link_time",
    "loss_curves",
    "memory_against_time",
    "memory_bars",
    "memory_lifetimes",
    "memory_timeline",
    "number_formats",
    "number_line",
    "operator_shares",
    "rates_by_type",
    "reduce_scatter",
    "ring_step",
    "route_bars",
    "running_sums",
    "scaler_trace",
    "scatter",
    "segment_peaks",
    "send_recv",
    "sequence_parallel",
    "sharding_ladder",
    "sharding_stages",
    "split_heads",
    "split_matrices",
    "split_matrix",
    "step_bars",
    "step_traces",
    "sum_errors",
    "tensor_parallel_link",
    "topology",
    "two_node_routes",
    "weights_over_step",
]
