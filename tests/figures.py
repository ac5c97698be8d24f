"""One call of every picture, with small made-up results, for tests and for looking at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labsupport import plots, published
from labsupport.config import ModelConfig
from labsupport.measure.kept import OperatorRow
from labsupport.measure.memory_timeline import Event, Holding, MemoryTimeline, replay
from labsupport.measure.topology import cpu_topology, parse_nvidia_smi_topo
from labsupport.measure.trace import COMMUNICATION, COMPUTE, Span, Trace
from labsupport.plan import training_memory
from labsupport.plan.communication import fit_latency_bandwidth, predict, ring_all_reduce
from labsupport.plan.gradient_sync import gradients_of
from labsupport.plan.links import roads
from labsupport.plan.parameter_shapes import shapes_of
from labsupport.plan.recompute import segmented_peak_bytes
from labsupport.plan.sharding import STAGES, shard
from labsupport.plan.traffic import naive_all_reduce_sent_bytes, ring_all_reduce_sent_bytes
from labsupport.plots import LabFigure
from labsupport.widgets import tensor_parallel_link


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


def _made_up_step() -> MemoryTimeline:
    """Ten activations, then as many gradients; the second step has optimizer state."""
    states = [Holding(40 * 2**20, "parameters"), Holding(80 * 2**20, "optimizer")]
    events = [Event(1, "before", states[0], 1), Event(1, "forward", None, 0)]
    for step in (1, 2):
        kept = [Holding(9 * 2**20, "activations") for _ in range(10)]
        new = [Holding(4 * 2**20, "gradients") for _ in range(10)]
        events += [Event(step, "forward", held, 1) for held in kept]
        for arriving, leaving in zip(new, kept, strict=True):
            events += [Event(step, "backward", arriving, 1), Event(step, "backward", leaving, -1)]
        events += [Event(step, "update", states[1], 1)] if step == 1 else []
        events += [Event(step, "after", held, -1) for held in new]
    return MemoryTimeline(replay(events))


@dataclass(frozen=True)
class StepRow:
    """What the plots need of a training step."""

    loss_scale: float
    skipped: bool


@dataclass(frozen=True)
class KeptRow:
    """What the plots need of a line of train.kept_types."""

    what: str
    num_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


def _kept(narrow: str, share: float) -> KeptRows:
    size = 5 * 2**20
    lines = {
        "parameters": {"float32": size},
        "gradients": {"float32": size},
        "optimizer moments": {"float32": 2 * size},
        "activations": {"float32": size, narrow: round(2 * size * share)},
    }
    return KeptRows(tuple(KeptRow(*line) for line in lines.items()))


@dataclass(frozen=True)
class KeptRows:
    """What the plots need of train.kept_types."""

    kept: tuple[KeptRow, ...]


def _peaks(layer_bytes: int) -> dict[int, float]:
    sizes = {"num_layers": 64, "input_bytes": 1, "layer_bytes": layer_bytes}
    return {k: segmented_peak_bytes(segment=k, **sizes) for k in (1, 2, 4, 8, 16)}


def _trace(*, overlapped: bool, num_ranks: int = 2) -> Trace:
    """A step of three backward pieces and their messages, a rank a little behind the other."""
    spans = []
    for rank in range(num_ranks):
        at = 0.002 * rank
        spans.append(Span(rank=rank, stream=COMPUTE, name="forward", start_s=at, end_s=at + 0.03))
        for i in range(3):
            start = at + 0.03 + 0.02 * i
            piece = {"name": f"layers.{2 - i} backward", "start_s": start, "end_s": start + 0.02}
            spans.append(Span(rank=rank, stream=COMPUTE, **piece))
            sent = start + 0.02 if overlapped else 0.09 + 0.015 * i
            message = {"name": "all_reduce", "start_s": sent, "end_s": sent + 0.015}
            spans.append(Span(rank=rank, stream=COMMUNICATION, **message))
        end = {"start_s": 0.14, "end_s": 0.145}
        spans.append(Span(rank=rank, stream=COMPUTE, name="optimizer", **end))
    return Trace(tuple(spans))


def _ladder(model: str, *world_sizes: int) -> dict[str, dict[int, Any]]:
    shapes = shapes_of(ModelConfig.named(model))
    return {
        stage: {n: shard(shapes, stage=stage, world_size=n).fullest.bytes_of for n in world_sizes}
        for stage in STAGES[:4]
    }


def _exchanges() -> dict[str, Any]:
    shapes, sizes = shapes_of(ModelConfig.named("tiny")), {"world_size": 4}
    plans = {stage: shard(shapes, stage=stage, **sizes) for stage in STAGES[:-1]}
    plans["hsdp"] = shard(shapes, stage="hsdp", replicate_size=2, **sizes)
    return {stage: plan.exchanges for stage, plan in plans.items()}


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
    "traces": lambda: plots.step_traces(
        {"after the backward": _trace(overlapped=False), "during it": _trace(overlapped=True)}
    ),
    "trace_8": lambda: plots.step_traces({"a step": _trace(overlapped=True, num_ranks=8)}),
    "bucket_size": lambda: plots.bucket_size(
        gradients_of(ModelConfig.named("1b"), bytes_per_gradient=2),
        bucket_bytes=2**25,
        backward_s=0.1,
        link=roads()["infiniband-ndr"],
        world_size=16,
    ),
    "by_tokens": lambda: plots.by_tokens(
        {
            "batch 512": [(512 * (i + 1), loss) for i, loss in enumerate(_losses())],
            "batch 2,048": [(2048 * (i + 1), loss + 0.3) for i, loss in enumerate(_losses()[:20])],
        },
        label="loss (nats per token)",
        title="Equal tokens",
        levels={"batch": 3.0},
    ),
    "activation_lifetimes": plots.activation_lifetimes,
    "segment_peaks": lambda: plots.segment_peaks(
        {"64 plain layers": (_peaks(1), _peaks(1)), "64 blocks": (_peaks(21), _peaks(21))}
    ),
    "operator_shares": lambda: plots.operator_shares(
        [
            OperatorRow(operator="silu", calls=1, kept_bytes=30, flops=1, time_s=1.0),
            OperatorRow(operator="mul", calls=9, kept_bytes=72, flops=3, time_s=3.0),
            OperatorRow(operator="attention", calls=1, kept_bytes=11, flops=130, time_s=2.0),
            OperatorRow(operator="mm", calls=7, kept_bytes=67, flops=1610, time_s=11.0),
        ]
    ),
    "memory_against_time": lambda: plots.memory_against_time(
        {
            "none": (3.4e8, 1.0),
            "every-2": (1.8e8, 1.1),
            "selective": (2e8, 1.04),
            "full": (2e7, 1.24),
        }
    ),
    "memory_lifetimes": plots.memory_lifetimes,
    "memory_timeline": lambda: plots.memory_timeline(_made_up_step()),
    "memory_bars": lambda: plots.memory_bars(
        {
            "1b, predicted": training_memory(
                ModelConfig.named("1b"), micro_batch_size=1, seq_len=8192, precision="bf16"
            ).bytes_of,
            "1b, one short sequence": training_memory(
                ModelConfig.named("1b"), micro_batch_size=1, seq_len=128
            ).bytes_of,
        },
        limit_bytes=40 * 2**30,
        title="One step",
    ),
    "link_small": lambda: plots.link_time(
        roads()["ethernet-100"], ring_all_reduce, name="all_reduce", world_size=64, size_bytes=2**12
    ),
    "sharding_stages": plots.sharding_stages,
    "sharding_stages_8": lambda: plots.sharding_stages(world_size=8),
    "sharding_ladder": lambda: plots.sharding_ladder(
        _ladder("tiny", 1, 2, 4), measured=_ladder("tiny", 1, 2, 4)
    ),
    "sharding_ladder_limit": lambda: plots.sharding_ladder(
        _ladder("llama-3.1-8b", 4, 8, 16, 32, 64), limit_bytes=80 * 2**30, title="8b"
    ),
    "exchanged_by_stage": lambda: plots.exchanged_by_stage(
        _exchanges(), unit_bytes=5 * S, counted={"ddp": 7.5 * S}
    ),
    "weights_over_step": lambda: plots.weights_over_step(
        {"freed": _made_up_step(), "kept": _made_up_step()}
    ),
    "split_matrix": plots.split_matrix,
    "split_matrices": plots.split_matrices,
    "split_matrices_4": lambda: plots.split_matrices(world_size=4),
    "split_heads": lambda: plots.split_heads(num_heads=4, num_kv_heads=2, world_size=4),
    "split_heads_16": lambda: plots.split_heads(num_heads=16, num_kv_heads=4, world_size=8),
    "sequence_parallel": plots.sequence_parallel,
    "causal_shares": plots.causal_shares,
    "tensor_parallel_link": lambda: tensor_parallel_link().figure,
    "step_bars": lambda: plots.step_bars({"alone": (0.03, 0.0), "2 ranks": (0.015, 0.16)}),
    "step_bars_of_two_models": lambda: plots.step_bars(
        {
            "narrow, alone": (0.12, 0.0),
            "narrow, 2 ranks": (0.06, 0.16),
            "wide, alone": (0.31, 0.0),
            "wide, 2 ranks": (0.155, 0.1),
        }
    ),
    "causal_shares_2": lambda: plots.causal_shares(world_size=2),
    "number_formats": plots.number_formats,
    "number_line": plots.number_line,
    "number_line_8_bits": lambda: plots.number_line(name="fp8 e4m3", value=500.0),
    "number_line_beyond": lambda: plots.number_line(name="fp16", value=1e6),
    "number_line_small": lambda: plots.number_line(name="fp8 e5m2", value=1e-6),
    "running_sums": lambda: plots.running_sums(
        {
            "fp32": [i * 1e-4 for i in range(1, 10_001)],
            "bf16": [min(i * 1e-4, 1 / 32) for i in range(1, 10_001)],
        },
        increment=1e-4,
    ),
    "scaler_trace": lambda: plots.scaler_trace(
        [StepRow(2.0 ** (24 - min(i, 7) + i // 10), i < 7 or i == 25) for i in range(40)]
    ),
    "bytes_by_type": lambda: plots.bytes_by_type(
        {"fp32": _kept("float32", 1.0), "bf16": _kept("bfloat16", 0.7)}
    ),
    "sum_errors": lambda: plots.sum_errors(
        {
            kind: {n: step * math.sqrt(n) for n in (2, 8, 32)}
            for kind, step in (("bf16", 2e-3), ("fp32", 2e-8))
        }
    ),
    "rates_by_type": lambda: plots.rates_by_type(
        {
            "V100": {"fp32": 15.7e12, "fp16": 125e12},
            "H100": {"fp32": 67e12, "fp16": 989e12, "bf16": 989e12},
        },
        best_measured={"H100": 794e12},
    ),
}
