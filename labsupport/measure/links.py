"""Which way should a sum travel when one cable is slow? Routes of one all-reduce, measured.

Two nodes of two ranks; S bytes on every rank; bytes on the cable, each direction:

    ring, every hop crosses    0 -> 2 -> 1 -> 3 -> 0     2 crossings x 2(n - 1)/n S = 3 S
    ring, nodes side by side   0 -> 1 -> 2 -> 3 -> 0     1 crossing  x 2(n - 1)/n S = 1.5 S
    hierarchy                  sum inside each node, exchange once, gather inside   = 1 S

    with two_nodes(processes_per_node=2) as nodes:
        table = compare_routes(nodes, size_bytes=2**22)
    table.rows[2].cable_bytes / 2**22              # 1.0 and a little for the headers

The cable's bytes are counted by the kernel on the interface, in both nodes; the larger counts.
Where there are no namespaces, `measure.slow_cable` stands in: it counts what it lets through.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from labsupport.devices import synchronize
from labsupport.measure.bench import size_text
from labsupport.measure.collectives import ALL_REDUCE, Case, Collective
from labsupport.measure.nodes import INTERFACE, TwoNodes
from labsupport.measure.slow_cable import EmulatedNodes

Reduce = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class RouteRow:
    """One route of an all-reduce over two nodes; the table says how it was measured."""

    route: str
    size_bytes: int
    time_s: float
    """Median call, on the slowest rank."""
    cable_bytes: int
    """Per call, in the busier direction, with headers and acknowledgements."""

    @property
    def cable_over_size(self) -> float:
        """How many times the data crossed the cable."""
        return self.cable_bytes / self.size_bytes


@dataclass(frozen=True, kw_only=True)
class RouteTable:
    """The routes in the order they were measured."""

    rows: tuple[RouteRow, ...]
    rate_bits_per_s: int
    label: str
    how: str
    """What was real and what was stood in for."""

    def to_json(self) -> str:
        """One object: label, rate, and the rows with units in their names."""
        return json.dumps(asdict(self), indent=1)

    @property
    def title(self) -> str:
        """The label and the how."""
        return f"{self.label}: {self.how}"

    def __repr__(self) -> str:
        return "\n".join([self.title, *("  ".join(cells) for cells in map(_cells, self.rows))])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{h}</th>" for h in ("route", "size", "time", "bytes on the cable"))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in _cells(row)) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        )


def _cells(row: RouteRow) -> list[str]:
    return [
        row.route,
        size_text(row.size_bytes),
        f"{row.time_s * 1e3:.0f} ms",
        f"{row.cable_over_size:.2f} × size",
    ]


def ring_all_reduce(x: torch.Tensor, *, order: Sequence[int]) -> None:
    """Sum `x` (items,) in place over all ranks, passed around in `order`: 2(n - 1)/n S a rank."""
    chunks = x.tensor_split(len(order))
    ring_reduce_scatter(chunks, order=order)
    ring_all_gather(chunks, order=order)


def hierarchical_all_reduce(x: torch.Tensor, *, processes_per_node: int) -> None:
    """Sum `x` (items,) in place: a share each inside the node, the share across once, and back.

    With k ranks a node, each rank sends S/k over the cable: S for the node, whatever k is.
    """
    k, rank = processes_per_node, dist.get_rank()
    node = range(rank - rank % k, rank - rank % k + k)
    chunks = x.tensor_split(k)
    ring_reduce_scatter(chunks, order=node)
    share = chunks[(rank + 1) % k]
    share.add_(_exchange(share, to=(rank + k) % (2 * k), source=(rank + k) % (2 * k)))
    ring_all_gather(chunks, order=node)


def ring_reduce_scatter(chunks: Sequence[torch.Tensor], *, order: Sequence[int]) -> None:
    """Afterwards the rank at place i of `order` holds the whole sum of chunk i + 1, in place.

    n - 1 steps; in each, every rank sends one chunk of S/n to the next.
    """
    n, here = len(order), list(order).index(dist.get_rank())
    after, before = order[(here + 1) % n], order[(here - 1) % n]
    for step in range(n - 1):
        received = _exchange(chunks[(here - step) % n], to=after, source=before)
        chunks[(here - step - 1) % n].add_(received)


def ring_all_gather(chunks: Sequence[torch.Tensor], *, order: Sequence[int]) -> None:
    """The rank at place i starts with chunk i + 1; afterwards every rank has all, in place.

    n - 1 steps; in each, every rank sends one chunk of S/n to the next.
    """
    n, here = len(order), list(order).index(dist.get_rank())
    after, before = order[(here + 1) % n], order[(here - 1) % n]
    for step in range(n - 1):
        received = _exchange(chunks[(here - step + 1) % n], to=after, source=before)
        chunks[(here - step) % n].copy_(received)


def _exchange(out: torch.Tensor, *, to: int, source: int) -> torch.Tensor:
    """Send `out` and receive as much (chunks are equal) at once, the receive posted first.

    gloo moves a message once its receiver has said where to put it. With the send first, two
    ranks that exchange 8 MiB over this cable took turns: 140 ms against 70 ms.
    """
    received = torch.empty_like(out)
    for work in (dist.irecv(received, source), dist.isend(out, to)):
        if work is not None:
            work.wait()
    return received


def _ring_case(size_bytes: int, device: str) -> Case:
    """As an all-reduce's, but the sum goes round our own ring, in the order of the ranks."""
    case = ALL_REDUCE.prepare(size_bytes, device)
    order = range(dist.get_world_size())
    return replace(case, run=lambda: ring_all_reduce(case.result, order=order))


RING_ALL_REDUCE = Collective(
    name="ring all_reduce", bus_factor=ALL_REDUCE.bus_factor, prepare=_ring_case
)
"""For `bench_collectives` on a cable that only point-to-point messages pass."""


def routes(processes_per_node: int) -> dict[str, Reduce]:
    """Three ways for two nodes, by the name that tables show."""
    k = processes_per_node
    side_by_side = list(range(2 * k))
    crossing = [rank for pair in zip(range(k), range(k, 2 * k), strict=True) for rank in pair]
    return {
        "ring, every hop crosses": lambda x: ring_all_reduce(x, order=crossing),
        "ring, nodes side by side": lambda x: ring_all_reduce(x, order=side_by_side),
        "hierarchy": lambda x: hierarchical_all_reduce(x, processes_per_node=k),
    }


def void(_: object) -> None:
    """Drops a result, where a function must return nothing."""


def compare_routes(
    nodes: TwoNodes | EmulatedNodes,
    *,
    size_bytes: int = 2**22,
    repeats: int = 3,
    deadline_s: float = 120.0,
) -> RouteTable:
    """Every route checked and timed on `nodes`, and the bytes that it put on the cable counted.

    Raises ValueError for fewer than two ranks a node (without an inside there is no hierarchy), and
    for a size that does not split into equal chunks.
    """
    if nodes.processes_per_node < 2:
        raise ValueError(f"{nodes.processes_per_node=} has no inside; processes_per_node=2 works")
    if size_bytes < 1 or size_bytes % (4 * nodes.world_size):
        raise ValueError(
            f"{size_bytes=} must split into {nodes.world_size} chunks of float32; 4194304 works"
        )
    chosen = routes(nodes.processes_per_node)
    count: Callable[[], int] = sent_through
    if isinstance(nodes, EmulatedNodes):
        count = nodes.count_cable_bytes
    else:
        chosen["gloo's own all_reduce"] = lambda x: void(dist.all_reduce(x))
    per_rank: list[list[RouteRow]] = nodes.run(
        routes_on_this_rank,
        chosen,
        count,
        size_bytes=size_bytes,
        repeats=repeats,
        deadline_s=deadline_s,
    )
    return RouteTable(
        rows=tuple(per_rank[0]),
        rate_bits_per_s=nodes.rate_bits_per_s,
        label=nodes.label,
        how=nodes.how,
    )


def routes_on_this_rank(
    chosen: Mapping[str, Reduce], cable_bytes: Callable[[], int], *, size_bytes: int, repeats: int
) -> list[RouteRow]:
    """The part that runs on every rank; every rank gets all rows."""
    return [
        _measure(name, reduce, cable_bytes, size_bytes, repeats) for name, reduce in chosen.items()
    ]


def _measure(
    name: str, reduce: Reduce, cable_bytes: Callable[[], int], size_bytes: int, repeats: int
) -> RouteRow:
    n, device = dist.get_world_size(), _device()
    x = torch.full((size_bytes // 4,), float(dist.get_rank() + 1), device=device)
    reduce(x)
    if not bool((x == n * (n + 1) / 2).all()):
        raise AssertionError(f"rank {dist.get_rank()}: {name!r} gave a wrong sum")
    x.zero_()
    times_s = []
    dist.barrier()
    sent_before = cable_bytes()
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        reduce(x)
        synchronize(device)
        times_s.append(time.perf_counter() - start)
    dist.barrier()
    sent = (cable_bytes() - sent_before) / repeats
    slowest = torch.tensor([*times_s, sent], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    *slow_s, cable = slowest.tolist()
    return RouteRow(
        route=name, size_bytes=size_bytes, time_s=median(slow_s), cable_bytes=round(cable)
    )


def _device() -> str:
    """Where this rank's tensors have to be: its GPU under nccl."""
    return "cpu" if dist.get_backend() != "nccl" else f"cuda:{torch.cuda.current_device()}"


def sent_through(interface: str = INTERFACE) -> int:
    """Bytes that left through an interface of this process's network since it came up."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"{interface=} is not in this network; lo is")
