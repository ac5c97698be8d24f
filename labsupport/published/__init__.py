"""What did others measure on hardware that is not here?

Each row is one published number with its source. An empty cell is None: not stated, not guessed.

    from labsupport import published
    h100 = [row for row in published.collectives() if row.gpu == "h100" and row.num_gpus == 8]
    max(row.bus_bandwidth_bytes_per_s for row in h100) / 1e9      # 336 GB/s
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = [
    "MatmulCeiling",
    "PublishedCollective",
    "PublishedRun",
    "collectives",
    "curves",
    "matmul_ceilings",
    "training_runs",
]


@dataclass(frozen=True, kw_only=True)
class PublishedCollective:
    """One message size of one collective, in nccl-tests' conventions."""

    source: str
    ref: str
    gpu: str
    topology: str
    """Nodes x GPUs per node: "2x8" is sixteen GPUs in two nodes."""
    num_gpus: int
    collective: str
    size_bytes: int
    time_s: float | None
    """None where only the bandwidth was published."""
    bus_bandwidth_bytes_per_s: float
    note: str

    @property
    def label(self) -> str:
        """What a plot writes beside the curve: "H100, 8 GPUs in 1 node"."""
        nodes = int(self.topology.split("x")[0])
        note = f", {self.note_of_curve}" if self.note_of_curve else ""
        where = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{self.gpu.upper()}, {self.num_gpus} GPUs in {where}{note}"

    @property
    def note_of_curve(self) -> str:
        """The part of the note that makes a curve another curve: NVLS on or off."""
        return next((word for word in ("NVLS on", "NVLS off") if word in self.note), "")


@dataclass(frozen=True, kw_only=True)
class MatmulCeiling:
    """The best matrix-multiply rate anybody reported for one GPU, beside the datasheet's."""

    source: str
    ref: str
    gpu: str
    precision: str
    datasheet_flops_per_s: float
    best_measured_flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One measured figure of one training run."""

    source: str
    ref: str
    family: str
    gpu: str
    num_gpus: int
    seq_len: int
    micro_batch_size: int
    recompute: str
    precision: str
    metric: str
    """peak_memory or tokens_per_s_per_gpu."""
    value: float
    unit: str
    note: str


@cache
def collectives() -> tuple[PublishedCollective, ...]:
    """All rows of collectives.csv, in file order."""
    return tuple(
        PublishedCollective(
            source=row["source"],
            ref=row["ref"],
            gpu=row["gpu"],
            topology=row["topology"],
            num_gpus=int(row["num_gpus"]),
            collective=row["collective"],
            size_bytes=int(row["size_bytes"]),
            time_s=float(row["time_us"]) / 1e6 if row["time_us"] else None,
            bus_bandwidth_bytes_per_s=float(row["bus_bandwidth_gb_s"]) * 1e9,
            note=row["note"],
        )
        for row in _read("collectives.csv")
    )


@cache
def matmul_ceilings() -> tuple[MatmulCeiling, ...]:
    """All rows of matmul_ceilings.csv, in file order."""
    return tuple(
        MatmulCeiling(
            source=row["source"],
            ref=row["ref"],
            gpu=row["gpu"],
            precision=row["precision"],
            datasheet_flops_per_s=float(row["datasheet_tflops"]) * 1e12,
            best_measured_flops_per_s=float(row["best_measured_tflops"]) * 1e12,
        )
        for row in _read("matmul_ceilings.csv")
    )


@cache
def training_runs() -> tuple[PublishedRun, ...]:
    """All rows of training.csv, in file order."""
    return tuple(
        PublishedRun(
            source=row["source"],
            ref=row["ref"],
            family=row["family"],
            gpu=row["gpu"],
            num_gpus=int(row["num_gpus"]),
            seq_len=int(row["seq_len"]),
            micro_batch_size=int(row["micro_batch_size"]),
            recompute=row["recompute"],
            precision=row["precision"],
            metric=row["metric"],
            value=float(row["value"]),
            unit=row["unit"],
            note=row["note"],
        )
        for row in _read("training.csv")
    )


def curves(
    rows: Iterable[PublishedCollective], *, at_least_points: int = 1
) -> dict[str, tuple[PublishedCollective, ...]]:
    """Rows sorted into curves: label -> rows of one GPU, topology and setting, by rising size."""
    grouped: dict[str, list[PublishedCollective]] = {}
    for row in rows:
        grouped.setdefault(row.label, []).append(row)
    return {
        label: tuple(sorted(group, key=lambda row: row.size_bytes))
        for label, group in grouped.items()
        if len(group) >= at_least_points
    }


def _read(name: str) -> list[dict[str, str]]:
    """The rows of one table that ships with the package."""
    text = files(__name__).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
