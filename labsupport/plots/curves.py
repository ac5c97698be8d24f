"""Curves: losses of one process and N ranks, bandwidth against size, and a fitted link.

loss_curves({"1 process": [5.1, 4.0], "2 ranks": [5.1, 4.0]})
bandwidth_curves({"2 ranks here": table.rows}, published=published.curves(rows))
latency_bandwidth_fit(table.rows, fit_latency_bandwidth(table.rows, world_size=2))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from labsupport.plan.communication import LinkFit
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    log_y_axis,
    new_figure,
    size_axis,
    size_label,
    styled,
    time_label,
)


class BandwidthRow(Protocol):
    """A row of `measure.bench` or of `published.collectives()`."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def bus_bandwidth_bytes_per_s(self) -> float: ...


class MeasuredRow(BandwidthRow, Protocol):
    """A row of `measure.bench`."""

    @property
    def algorithm_bandwidth_bytes_per_s(self) -> float: ...
    @property
    def time_s(self) -> float: ...


class TimedRow(Protocol):
    """A size and the time it took."""

    @property
    def size_bytes(self) -> float: ...
    @property
    def time_s(self) -> float: ...


@styled
def loss_curves(
    curves: Mapping[str, Sequence[float]], *, title: str = "Training loss"
) -> LabFigure:
    """Loss by step, a line each; the first is the reference, drawn broad under the others.

    With two or more curves of one length, a lower panel shows how far each is from the first.
    """
    if not curves or not all(len(losses) for losses in curves.values()):
        raise ValueError("curves must hold at least one list of losses; {'1 process': [5.0]} works")
    names = list(curves)
    same_length = len({len(curves[name]) for name in names}) == 1
    two_panels = len(names) > 1 and same_length
    figure, axes = new_figure(
        height_in=4.4 if two_panels else 3.2,
        rows=2 if two_panels else 1,
        height_ratios=(3, 1.3) if two_panels else None,
        share_x=two_panels,
        alt=f"{title}: " + ", ".join(f"{n} ends at {curves[n][-1]:.3f}" for n in names),
    )
    upper = axes[0] if two_panels else axes
    ends = {}
    for i, name in enumerate(names):
        losses = curves[name]
        broad = {"linewidth": 6, "alpha": 0.35} if i == 0 and len(names) > 1 else {}
        upper.plot(range(1, len(losses) + 1), losses, color=COLOURS[i % len(COLOURS)], **broad)
        ends[name] = (float(len(losses)), float(losses[-1]), COLOURS[i % len(COLOURS)])
    upper.set_ylabel("loss (nats per token)")
    upper.set_title(title)
    if two_panels:
        _differences(axes[1], curves)
    (axes[1] if two_panels else upper).set_xlabel("step")
    label_line_ends(upper, ends, gap_pt=14)
    return figure


def _differences(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """|loss - reference| by step on a logarithmic axis; equal losses sit on the floor."""
    (_, reference), *others = curves.items()
    floor = 1e-9
    for i, (_, losses) in enumerate(others, start=1):
        apart = [max(floor, abs(a - b)) for a, b in zip(losses, reference, strict=True)]
        axes.plot(range(1, len(apart) + 1), apart, ".", color=COLOURS[i % len(COLOURS)])
    axes.set_yscale("log")
    axes.set_ylim(floor / 3, 10)
    axes.set_yticks([1e-9, 1e-6, 1e-3, 1], ["≤ 1e-9", "1e-6", "1e-3", "1"])
    axes.minorticks_off()
    axes.set_ylabel("difference")


@styled
def bandwidth_curves(
    measured: Mapping[str, Sequence[BandwidthRow]],
    *,
    published: Mapping[str, Sequence[BandwidthRow]] | None = None,
    title: str = "Bus bandwidth",
) -> LabFigure:
    """Bus bandwidth against size, both logarithmic: measured solid, published dashed."""
    others = dict(published or {})
    everything = {**measured, **others}
    if not everything:
        raise ValueError("nothing to draw; {'2 ranks here': table.rows} works")
    alt = "; ".join(f"{n} reaches {_best(rows):.3g} GB/s" for n, rows in everything.items())
    figure, axes = new_figure(height_in=4.6 if others else 3.6, alt=f"{title}: {alt}")
    ends = {}
    for i, (name, rows) in enumerate([*measured.items(), *others.items()]):
        colour = COLOURS[i % len(COLOURS)]
        x = [row.size_bytes for row in rows]
        y = [row.bus_bandwidth_bytes_per_s / 1e9 for row in rows]
        style = "o-" if name in measured else "--"
        axes.plot(x, y, style, color=colour, linewidth=2.2 if name in measured else 1.4)
        ends[name] = (float(x[-1]), y[-1], colour)
    log_y_axis(axes, lambda tick: f"{tick:g}")
    size_axis(axes, [row.size_bytes for rows in everything.values() for row in rows])
    axes.set_ylabel("GB/s, one way")
    kinds = "solid: measured; dashed: published" if others and measured else ""
    kinds = kinds or ("published" if others else "measured")
    axes.set_title(f"{title} ({kinds})")
    label_line_ends(axes, ends)
    return figure


@styled
def algorithm_and_bus_bandwidth(tables: Mapping[int, Sequence[MeasuredRow]]) -> LabFigure:
    """The same all-reduces twice, by world size: algorithm bandwidth falls with n, bus hardly."""
    if not tables:
        raise ValueError("tables is empty; {2: table.rows, 4: other.rows} works")
    figure, (left, right) = new_figure(
        columns=2, height_in=3.4, alt="Algorithm and bus bandwidth by size and number of ranks"
    )
    panels = (
        (left, "algorithm", "Algorithm bandwidth: what I get"),
        (right, "bus", "Bus bandwidth: what the link carries"),
    )
    ends_of_panel = []
    for axes, which, title in panels:
        ends = {}
        for i, (n, rows) in enumerate(sorted(tables.items())):
            values = [getattr(row, f"{which}_bandwidth_bytes_per_s") / 1e9 for row in rows]
            axes.plot([r.size_bytes for r in rows], values, "o-", color=COLOURS[i % len(COLOURS)])
            ends[f"n = {n}"] = (float(rows[-1].size_bytes), values[-1], COLOURS[i % len(COLOURS)])
        size_axis(axes, [row.size_bytes for rows in tables.values() for row in rows])
        axes.set_title(title, fontsize=9.5)
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        ends_of_panel.append(ends)
    top = max(left.get_ylim()[1], right.get_ylim()[1])
    for axes, ends in zip((left, right), ends_of_panel, strict=True):
        axes.set_ylim(0, top)
        label_line_ends(axes, ends)
    return figure


@styled
def latency_bandwidth_fit(
    points: Sequence[TimedRow], fit: LinkFit, *, title: str = "A link has two numbers"
) -> LabFigure:
    """Measured times, the fitted line, its two terms, and the size at which they cost the same."""
    sizes = [float(point.size_bytes) for point in points]
    grid = [min(sizes) * (max(sizes) / min(sizes)) ** (i / 200) for i in range(201)]
    terms = [fit.predict(size_bytes=size) for size in grid]
    figure, axes = new_figure(height_in=4.0, alt=f"{title}: {fit}")
    axes.plot(grid, [t.latency_s for t in terms], "--", color=COLOURS[1], linewidth=1.3)
    axes.plot(grid, [t.transfer_s for t in terms], "--", color=COLOURS[2], linewidth=1.3)
    axes.plot(grid, [t.total_s for t in terms], "-", color=COLOURS[0])
    axes.plot(sizes, [point.time_s for point in points], "o", color=INK, markersize=5)
    times = [point.time_s for point in points]
    axes.set_ylim(min(*times, terms[0].latency_s) / 3, max(*times, terms[-1].total_s) * 1.6)
    if min(sizes) < fit.crossover_bytes < max(sizes):
        axes.axvline(fit.crossover_bytes, color=QUIET, linewidth=1, linestyle=":")
        axes.annotate(
            f"latency = transfer\nat {size_label(fit.crossover_bytes)}",
            xy=(fit.crossover_bytes, axes.get_ylim()[1]),
            xytext=(-5, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=QUIET,
        )
    size_axis(axes, sizes)
    log_y_axis(axes, time_label)
    axes.set_ylabel("time")
    axes.set_title(
        f"{title}: {fit.latency_s * 1e6:.3g} µs a step, "
        f"{fit.bandwidth_bytes_per_s / 1e9:.3g} GB/s; typical error {fit.median_relative_error:.0%}"
    )
    last, end = terms[-1], grid[-1]
    ends = {
        "latency term": (end, last.latency_s, COLOURS[1]),
        "transfer term": (end, last.transfer_s, COLOURS[2]),
        "fit (their sum)": (end, last.total_s, COLOURS[0]),
        "measured": (end, points[-1].time_s, INK),
    }
    label_line_ends(axes, ends)
    return figure


def _best(rows: Sequence[BandwidthRow]) -> float:
    return max(row.bus_bandwidth_bytes_per_s for row in rows) / 1e9
