"""Bars: bytes that each rank sends, how they grow with the ranks, and four routes over one cable.

bytes_per_rank({"naive": counted, "ring": counted_ring}, size_bytes=S, predicted=...)
bytes_by_world_size((2, 4, 8, 16))
route_bars(table.rows)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from labsupport.plan.traffic import naive_all_reduce_sent_bytes
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    new_figure,
    size_label,
    styled,
    time_label,
)


class RouteRow(Protocol):
    """A row of `measure.links.compare_routes`."""

    @property
    def route(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def cable_bytes(self) -> int: ...


@styled
def bytes_per_rank(
    counted: Mapping[str, Sequence[int]],
    *,
    size_bytes: int,
    predicted: Mapping[str, Sequence[int]] | None = None,
) -> LabFigure:
    """Bytes sent by each rank, a panel for each algorithm, in multiples of the buffer's S bytes.

    `counted[name][rank]` are bytes; `predicted` of the same shape is drawn as a line on each bar.
    """
    if not counted or size_bytes <= 0:
        raise ValueError(f"{size_bytes=} must be above 0 and counted not empty; 4096 works")
    names = list(counted)
    figure, axes = new_figure(
        columns=len(names),
        height_in=3.0,
        alt="Bytes sent by each rank, in buffers: "
        + "; ".join(f"{n} {[round(b / size_bytes, 2) for b in counted[n]]}" for n in names),
    )
    top = max(max(values) for values in counted.values()) / size_bytes
    for i, name in enumerate(names):
        axis = axes[i] if len(names) > 1 else axes
        shares = [value / size_bytes for value in counted[name]]
        bars = axis.bar(range(len(shares)), shares, width=0.62, color=COLOURS[i], alpha=0.75)
        axis.bar_label(bars, [f"{share:.3g} S" for share in shares], padding=2)
        for rank, value in enumerate((predicted or {}).get(name, ())):
            height = value / size_bytes
            axis.plot([rank - 0.42, rank + 0.42], [height, height], color=INK, linewidth=1.6)
        total = sum(counted[name])
        axis.set_title(f"{name}: {size_label(total)} in all", fontsize=9.5)
        axis.set_xticks(range(len(shares)), [f"rank {r}" for r in range(len(shares))])
        axis.set_ylim(0, top * 1.18)
        axis.set_ylabel(f"bytes sent (S = {size_label(size_bytes)})" if i == 0 else "")
        axis.grid(axis="x", visible=False)
    if predicted:
        figure.supxlabel("bar: counted     line: predicted", fontsize=9, color=QUIET)
    return figure


@styled
def bytes_by_world_size(
    world_sizes: Sequence[int],
    *,
    counted: Mapping[int, Sequence[int]] | None = None,
    size_bytes: int = 1,
) -> LabFigure:
    """Does communication grow with the ranks? Busiest rank and total, ring and naive, against n.

    `counted[n][rank]` are bytes counted of a ring all-reduce of `size_bytes`, drawn as dots.
    """
    ns = sorted(world_sizes)
    if not ns or ns[0] < 2:
        raise ValueError(f"{world_sizes=} must be at least 2 each; (2, 4, 8) works")
    figure, (left, right) = new_figure(
        columns=2,
        height_in=3.2,
        alt="A rank of a ring never sends more than 2 S; all ranks together send 2(n - 1) S",
    )
    ring = [2 * (n - 1) / n for n in ns]
    naive = [max(naive_all_reduce_sent_bytes(size_bytes=1, world_size=n)) for n in ns]
    left.plot(ns, naive, "--", color=COLOURS[1])
    left.plot(ns, ring, "-", color=COLOURS[0])
    left.axhline(2, color=QUIET, linewidth=1, linestyle=":")
    left.annotate(
        "2 S",
        xy=(ns[0], 2),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        color=QUIET,
    )
    left.set_ylim(0, max(4, min(8, naive[-1])) * 1.05)
    left.set_title("Busiest rank")
    right.plot(ns, [2 * (n - 1) for n in ns], "-", color=COLOURS[0])
    right.set_ylim(0, 2 * ns[-1])
    right.set_title("All ranks together")
    for n, sent in (counted or {}).items():
        left.plot([n], [max(sent) / size_bytes], "o", color=INK)
        right.plot([n], [sum(sent) / size_bytes], "o", color=INK)
    for axis in (left, right):
        axis.set_xlabel("ranks")
        axis.set_xticks(ns)
        axis.set_ylabel("bytes sent, in buffers of S")
    shown = min(naive[-1], left.get_ylim()[1])
    label_line_ends(
        left,
        {
            "naive": (float(ns[-1]), shown, COLOURS[1]),
            "ring": (float(ns[-1]), ring[-1], COLOURS[0]),
        },
        gap_pt=13,
    )
    label_line_ends(right, {"ring or naive": (float(ns[-1]), 2.0 * (ns[-1] - 1), COLOURS[0])})
    return figure


@styled
def route_bars(rows: Sequence[RouteRow]) -> LabFigure:
    """Routes of one all-reduce over a slow cable: bytes on the cable, and time."""
    if not rows:
        raise ValueError("no rows; compare_routes(nodes).rows works")
    figure, (left, right) = new_figure(
        columns=2,
        height_in=0.9 + 0.5 * len(rows),
        alt="; ".join(
            f"{row.route}: {row.cable_bytes / row.size_bytes:.2f} S in {time_label(row.time_s)}"
            for row in rows
        ),
    )
    places = range(len(rows))
    _horizontal(left, [r.cable_bytes / r.size_bytes for r in rows], "{:.2f} S", COLOURS[1])
    _horizontal(right, [r.time_s * 1e3 for r in rows], "{:.0f} ms", COLOURS[0])
    left.set_yticks(places, [row.route for row in rows])
    right.set_yticks(places, [""] * len(rows))
    left.set_title(f"On the cable (S = {size_label(rows[0].size_bytes)})", fontsize=9.5)
    right.set_title("Time of one all-reduce", fontsize=9.5)
    return figure


def _horizontal(axes: Any, values: Sequence[float], form: str, colour: str) -> None:
    bars = axes.barh(range(len(values)), values, height=0.6, color=colour, alpha=0.75)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3)
    axes.set_xlim(0, max(values) * 1.25)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xticks([])
