"""What is kept, for how long, by whom, and at what price: pictures of activation checkpointing.

activation_lifetimes(num_layers=5)
segment_peaks({"64 layers": (curve, measured)})
operator_shares(kept_by_operator(...).rows)
memory_against_time({"none": (kept_bytes, 1.0), "full": (fewer_bytes, 1.25)})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from labsupport.plots.style import (
    COLOURS,
    FAINT,
    INK,
    QUIET,
    LabFigure,
    new_figure,
    size_label,
    styled,
)

KEPT, AGAIN, RUNNING = COLOURS[0], COLOURS[1], COLOURS[2]


class Operator(Protocol):
    """A row of `measure.kept`."""

    @property
    def operator(self) -> str: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def time_s(self) -> float: ...


@styled
def activation_lifetimes(*, num_layers: int = 5) -> LabFigure:
    """Who holds what, and when: all kept on the left, every block checkpointed on the right.

    A block's forward takes 1 unit of time, its backward 2. Raises ValueError beyond 12 layers.
    """
    if not 1 <= num_layers <= 12:
        raise ValueError(f"{num_layers=} must lie in 1…12 to be legible, for example 5")
    figure, panels = new_figure(
        columns=2,
        height_in=1.5 + 0.3 * num_layers,
        alt=f"{num_layers} blocks: kept until backward, or forgotten and computed again",
    )
    for axes, again, title in (
        (panels[0], 0, "keep everything"),
        (panels[1], 1, "checkpoint every block"),
    ):
        for index in range(num_layers):
            _draw_block(axes, index, num_layers, again=again)
        end = num_layers * (3 + again)
        axes.axvline(num_layers, color=QUIET, linewidth=1, linestyle=":")
        axes.set_xlim(0, 4 * num_layers)
        axes.set_ylim(-0.2, num_layers + 0.1)
        axes.set_yticks([i + 0.4 for i in range(num_layers)], range(1, num_layers + 1))
        axes.set_xticks([num_layers / 2, (num_layers + end) / 2], ["forward", "backward"])
        axes.tick_params(length=0)
        axes.set_ylabel("block")
        axes.grid(visible=False)
        axes.set_title(f"{title}: {end} units of time", fontsize=9.5)
    handles = [
        Rectangle((0, 0), 1, 1, color=RUNNING, label="at work"),
        Rectangle((0, 0), 1, 1, color=KEPT, alpha=0.45, label="holds all it needs"),
        Rectangle((0, 0), 1, 1, color=KEPT, alpha=0.9, label="holds its input only (thin)"),
        Rectangle((0, 0), 1, 1, color=AGAIN, label="forward again"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_block(axes: Any, index: int, num_layers: int, *, again: int) -> None:
    """One row: forward, what is held meanwhile, forward again, backward."""
    back = num_layers + (num_layers - 1 - index) * (2 + again)
    axes.add_patch(Rectangle((index, index), 1, 0.8, color=RUNNING))
    height, alpha = (0.15, 0.9) if again else (0.8, 0.45)
    held = Rectangle((index + 1, index), back - index - 1, height, color=KEPT, alpha=alpha)
    held.set_linewidth(0)
    axes.add_patch(held)
    axes.add_patch(Rectangle((back, index), again, 0.8, color=AGAIN))
    axes.add_patch(Rectangle((back + again, index), 2, 0.8, color=RUNNING))


@styled
def segment_peaks(
    series: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
) -> LabFigure:
    """Most activations held, against layers a segment: predicted line, measured points, by panel.

    Each value is (predicted, measured), both segment -> multiples of a layer's input.
    """
    if not series:
        raise ValueError("series is empty; {'64 layers': ({1: 65}, {1: 65})} works")
    figure, panels = new_figure(
        columns=len(series), height_in=3.1, alt="Peak of the activations by length of a segment"
    )
    for axes, (name, (curve, points)) in zip(
        [panels] if len(series) == 1 else panels, series.items(), strict=True
    ):
        best = min(curve, key=lambda segment: curve[segment])
        axes.plot(list(curve), list(curve.values()), color=QUIET, linewidth=1.2)
        axes.plot(list(points), list(points.values()), "o", color=COLOURS[0], markersize=6)
        axes.axvline(best, color=COLOURS[1], linewidth=1.2, linestyle="--")
        axes.set_xscale("log", base=2)
        ticks = [2**power for power in range(12) if min(curve) <= 2**power <= max(curve)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layers a segment")
        axes.set_ylabel("peak, in inputs of a layer")
        axes.set_title(f"{name}\nsmallest at {best}", fontsize=9.5)
    return figure


@styled
def operator_shares(rows: Sequence[Operator]) -> LabFigure:
    """Three bars: each operator's share of the bytes kept, of the FLOPs, and of the time.

    Operators that keep nothing are grey.
    """
    bars: dict[str, list[float]] = {
        "bytes kept": [row.kept_bytes for row in rows],
        "FLOPs": [row.flops for row in rows],
        "time here": [row.time_s for row in rows],
    }
    if not rows or not all(sum(values) for values in bars.values()):
        raise ValueError("rows must keep bytes, have FLOPs and take time; kept_by_operator's do")
    figure, axes = new_figure(height_in=2.3, alt="Shares of operators in bytes, FLOPs and time")
    for y, (name, values) in enumerate(reversed(bars.items())):
        left = 0.0
        for i, (row, value) in enumerate(zip(rows, values, strict=True)):
            share = value / sum(values)
            colour = COLOURS[i % len(COLOURS)] if row.kept_bytes else QUIET
            axes.barh([y], [share], left=[left], color=colour, alpha=0.75, edgecolor="white")
            if share > 0.09:
                axes.text(left + share / 2, y, row.operator, ha="center", va="center", fontsize=9)
            left += share
        axes.text(-0.015, y, name, ha="right", va="center")
    axes.set_xlim(-0.16, 1)
    axes.set_axis_off()
    axes.set_title("One block's forward pass: who keeps, who computes, who takes time")
    return figure


@styled
def memory_against_time(
    points: Mapping[str, tuple[float, float]], *, title: str = "What is kept against what it costs"
) -> LabFigure:
    """(bytes kept, time / time with everything kept) by name; a straight line joins none and full.

    Left below is better. Raises ValueError without points named none and full.
    """
    if not {"none", "full"} <= set(points):
        raise ValueError("points must hold 'none' and 'full', for example {'none': (8, 1), ...}")
    figure, axes = new_figure(height_in=3.4, alt=f"{title}: " + ", ".join(points))
    ends = [points["none"], points["full"]]
    unit = size_label(max(size for size, _ in points.values())).split()[1]
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    axes.plot(
        [ratio for _, ratio in ends],
        [size / factor for size, _ in ends],
        color=FAINT,
        linewidth=4,
        zorder=1,
    )
    for i, (name, (size, ratio)) in enumerate(points.items()):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot([ratio], [size / factor], "o", color=colour, markersize=9)
        below = i % 2 == 1 and name not in ("none", "full")  # neighbours apart
        axes.annotate(
            name,
            (ratio, size / factor),
            xytext=(-9, -15) if below else (9, 7),
            textcoords="offset points",
            ha="right" if below else "left",
            color=INK,
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.margins(x=0.15)
    axes.set_xlabel("time of a step, everything kept = 1")
    axes.set_ylabel(f"activations kept ({unit})")
    axes.set_title(title)
    return figure
