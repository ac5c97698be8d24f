"""How fast is each collective between these ranks, from 1 KiB to 64 MiB?

    table = bench_collectives(ranks)                          # any pool with .run; a row per size
    table = bench_collectives(ranks, collectives=(ALL_GATHER, BROADCAST), max_bytes=2**20)
    table                                                     # a table in a notebook
    table.to_json()                                           # for other tools

How a size is timed: its result is checked once; then all ranks meet at a barrier and make k calls
in a row. Such a block ends when its slowest rank ends, and its time is divided by k. The row gives
the median of five blocks, and the fastest and slowest as spread. A warm-up chooses k, the same on
every rank, so that a size takes about `budget_s`.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from labsupport.devices import synchronize
from labsupport.measure.collectives import (
    ALL_REDUCE,
    Case,
    Collective,
    algorithm_bandwidth,
    bus_bandwidth,
)

BLOCKS = 5
MOST_CALLS_A_BLOCK = 50


class Pool(Protocol):
    """Whatever runs a function on every rank: `labsupport.Ranks`, `measure.nodes.TwoNodes`."""

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective at one size. Label: measured."""

    collective: str
    world_size: int
    size_bytes: int
    time_s: float
    """Median block: the time of one call, on the slowest rank."""
    fastest_s: float
    slowest_s: float
    calls: int
    """Timed calls, all blocks together."""
    algorithm_bandwidth_bytes_per_s: float
    bus_bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTable:
    """All rows of one run, and where they were measured."""

    rows: tuple[CollectiveRow, ...]
    backend: str
    device: str
    label: str = "measured"

    def to_json(self) -> str:
        """One object: label, backend, device, and the rows with units in their names."""
        return json.dumps(asdict(self), indent=1)

    @property
    def title(self) -> str:
        """ "measured: 2 ranks, gloo on cpu"."""
        world_size = self.rows[0].world_size if self.rows else 0
        return f"{self.label}: {world_size} ranks, {self.backend} on {self.device}"

    def __repr__(self) -> str:
        lines = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        text = [
            "  ".join(
                [line[0].ljust(widths[0])]
                + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
            )
            for line in lines
        ]
        return "\n".join([self.title, *text])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


_HEAD = [
    "collective",
    "size",
    "time (µs)",
    "fastest-slowest",
    "algorithm GB/s",
    "bus GB/s",
    "calls",
]


def _cells(row: CollectiveRow) -> list[str]:
    return [
        row.collective,
        size_text(row.size_bytes),
        f"{row.time_s * 1e6:,.0f}",
        f"{row.fastest_s * 1e6:,.0f}-{row.slowest_s * 1e6:,.0f}",
        f"{row.algorithm_bandwidth_bytes_per_s / 1e9:.3g}",
        f"{row.bus_bandwidth_bytes_per_s / 1e9:.3g}",
        str(row.calls),
    ]


def size_text(size_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def sizes(*, min_bytes: int = 2**10, max_bytes: int = 2**26, step_factor: int = 2) -> list[int]:
    """min, min x factor, ... up to max, all powers apart by the factor, in bytes."""
    if not (4 <= min_bytes <= max_bytes and step_factor >= 2):
        raise ValueError(
            f"{min_bytes=} must be at least 4 and at most {max_bytes=}, {step_factor=} at least 2; "
            "1024, 67108864 and 2 work"
        )
    found = [min_bytes]
    while found[-1] * step_factor <= max_bytes:
        found.append(found[-1] * step_factor)
    return found


def bench_collectives(
    pool: Pool,
    *,
    collectives: Sequence[Collective] = (ALL_REDUCE,),
    min_bytes: int = 2**10,
    max_bytes: int = 2**26,
    step_factor: int = 2,
    budget_s: float = 0.2,
) -> CollectiveTable:
    """Check and time collectives on every rank of `pool`, from `min_bytes` to `max_bytes`.

    A size takes about `budget_s`, or seven calls where those take longer. Raises what the ranks
    raise (AssertionError for a wrong result), and ValueError for sizes or a budget of no sense.
    """
    chosen = sizes(min_bytes=min_bytes, max_bytes=max_bytes, step_factor=step_factor)
    if budget_s <= 0:
        raise ValueError(f"{budget_s=} must be above 0 s; 0.2 works")
    table: CollectiveTable = pool.run(
        bench_on_this_rank, tuple(collectives), tuple(chosen), budget_s=budget_s
    )[0]
    return replace(table, label=getattr(pool, "label", table.label))  # emulated on a slow_cable


def bench_on_this_rank(
    collectives: Sequence[Collective], sizes_bytes: Sequence[int], *, budget_s: float = 0.2
) -> CollectiveTable:
    """The part that runs on every rank, torch.distributed being up; every rank gets all rows."""
    device = "cpu" if dist.get_backend() != "nccl" else f"cuda:{torch.cuda.current_device()}"
    rows = [
        row
        for collective in collectives
        for row in _bench_sizes(collective, sizes_bytes, device, budget_s)
    ]
    return CollectiveTable(
        rows=tuple(rows), backend=dist.get_backend(), device=device.split(":")[0]
    )


def _bench_sizes(
    collective: Collective, sizes_bytes: Sequence[int], device: str, budget_s: float
) -> list[CollectiveRow]:
    """Rows of one collective. Every round times a block of each size.

    Going round, instead of from size to size, spreads a slow second of the machine over all sizes,
    where the medians can ignore it.
    """
    cases = [collective.prepare(size_bytes, device) for size_bytes in sizes_bytes]
    calls = [_calls_a_block(case, device, budget_s) for case in cases]
    blocks_s: list[list[float]] = [[] for _ in cases]
    for _ in range(BLOCKS):
        for case, count, times_s in zip(cases, calls, blocks_s, strict=True):
            times_s.append(_slowest(_block(case, calls=count, device=device), device))
    return [
        _row(collective, case, count, times_s)
        for case, count, times_s in zip(cases, calls, blocks_s, strict=True)
    ]


def _calls_a_block(case: Case, device: str, budget_s: float) -> int:
    """How many calls fit into a block, after the result has been checked once."""
    case.run()
    case.check()
    case.clear()
    once_s = _slowest(_block(case, calls=1, device=device), device)
    return max(1, min(MOST_CALLS_A_BLOCK, int(budget_s / BLOCKS / once_s)))


def _row(
    collective: Collective, case: Case, calls: int, blocks_s: Sequence[float]
) -> CollectiveRow:
    time_s, world_size = median(blocks_s), dist.get_world_size()
    return CollectiveRow(
        collective=collective.name,
        world_size=world_size,
        size_bytes=case.size_bytes,
        time_s=time_s,
        fastest_s=min(blocks_s),
        slowest_s=max(blocks_s),
        calls=calls * BLOCKS,
        algorithm_bandwidth_bytes_per_s=algorithm_bandwidth(
            size_bytes=case.size_bytes, time_s=time_s
        ),
        bus_bandwidth_bytes_per_s=bus_bandwidth(
            collective, size_bytes=case.size_bytes, time_s=time_s, world_size=world_size
        ),
    )


def _block(case: Case, *, calls: int, device: str) -> float:
    """Seconds for one of `calls` calls in a row on this rank, after a common start."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        case.run()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def _slowest(time_s: float, device: str) -> float:
    """The largest of all ranks' times, on every rank. 8 bytes a rank."""
    slowest = torch.tensor([time_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
