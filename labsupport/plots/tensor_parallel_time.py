"""Computing and waiting of a tensor-parallel rank: on one link, and against the width of the model.

tensor_parallel_link({2: {4096: time}, 8: {4096: other}}, size=8, hidden_size=4096, name="NVLink 4")
step_bars({"alone": (0.031, 0.0), "1 Gb/s": (0.016, 0.16)})
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.ticker import NullLocator, PercentFormatter

from labsupport.plan.tensor_parallel_step import TensorParallelTime
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    new_figure,
    styled,
    time_label,
)

COMPUTING, WAITING = COLOURS[2], COLOURS[1]


@styled
def tensor_parallel_link(
    times: Mapping[int, Mapping[int, TensorParallelTime]],
    *,
    size: int,
    hidden_size: int,
    name: str,
    measured: Mapping[tuple[int, int], float] | None = None,
) -> LabFigure:
    """Above: one case. Below: utilisation against hidden size, a line for each number of ranks.

    `times` is ranks -> hidden size -> prediction; `measured` (ranks, hidden size) -> utilisation.
    """
    here = times[size][hidden_size]
    verdict = "slower than" if here.speedup < 1 else f"{here.speedup:.2g} times as fast as"
    words = f"{size} ranks, hidden {hidden_size:,}, {name}\n{verdict} one rank alone"
    figure, (upper, lower) = new_figure(
        rows=2, height_in=4.7, height_ratios=(1, 3.2), alt=f"{words}, {here.utilisation:.0%} busy"
    )
    upper.barh([0], [here.compute_s], color=COMPUTING, alpha=0.75)
    upper.barh([0], [here.communication_s], left=[here.compute_s], color=WAITING, alpha=0.75)
    upper.set_axis_off()
    upper.set_xlim(0, here.step_s)
    upper.set_ylim(-1.3, 0.6)
    computing = f"computing {time_label(here.compute_s)} ({here.utilisation:.0%})"
    upper.text(0, -0.55, computing, color=COMPUTING, va="top")
    waiting = f"waiting {time_label(here.communication_s)}"
    upper.text(here.step_s, -0.55, waiting, color=WAITING, va="top", ha="right")
    upper.set_title(f"{words} (predicted)", fontsize=9.5)
    ends = {}
    for i, (ranks, by_width) in enumerate(times.items()):
        widths, values = list(by_width), [time.utilisation for time in by_width.values()]
        lower.plot(widths, values, color=COLOURS[i], linewidth=2.6 if ranks == size else 1.2)
        ends[f"{ranks} ranks"] = (float(widths[-1]), values[-1], COLOURS[i])
        points = {w: share for (n, w), share in (measured or {}).items() if n == ranks}
        lower.plot(list(points), list(points.values()), "o", color=COLOURS[i], markersize=8)
    lower.plot([hidden_size], [here.utilisation], "D", color=INK, markersize=7)
    lower.set_xscale("log", base=2)
    lower.set_xticks(widths, [f"{width:,}" for width in widths])
    lower.xaxis.set_minor_locator(NullLocator())
    lower.yaxis.set_major_formatter(PercentFormatter(1))
    lower.set_ylim(0, 1.03)
    lower.set_xlabel("hidden size" + (" (dots: measured here)" if measured else ""))
    lower.set_ylabel("share spent computing")
    label_line_ends(lower, ends)
    return figure


@styled
def step_bars(steps: Mapping[str, tuple[float, float]], *, title: str = "A step") -> LabFigure:
    """A bar a case: seconds of computing, then of waiting.

    Dashed from each case that waits for nobody, down to the next such: whoever ends beyond, loses.
    Raises ValueError for no case.
    """
    if not steps:
        raise ValueError("steps is empty; {'alone': (0.03, 0.0)} works")
    figure, axes = new_figure(
        height_in=1.5 + 0.42 * len(steps), alt="Seconds of computing and waiting in a step"
    )
    rows = [(len(steps) - 1 - i, *case) for i, case in enumerate(steps.values())]
    heights, computing, waiting = zip(*rows, strict=True)
    kinds = {"label": "computing", "color": COMPUTING}, {"label": "the rest", "color": WAITING}
    axes.barh(heights, computing, alpha=0.75, **kinds[0])
    axes.barh(heights, waiting, left=computing, alpha=0.75, **kinds[1])
    alone = [y for y, _, rest in rows if rest == 0]
    for y, busy, rest in rows:
        axes.annotate(
            time_label(busy + rest),
            xy=(busy + rest, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},  # over the dashed line
        )
        if rest == 0:
            below = max((other for other in alone if other < y), default=-1)
            axes.plot([busy] * 2, [y - 0.4, below + 0.55], color=QUIET, linewidth=1.2, ls="--")
    axes.set_yticks(heights, list(steps))
    axes.set_xlim(0, 1.14 * max(map(sum, steps.values())))
    axes.xaxis.set_major_formatter(lambda tick, _: time_label(tick) if tick > 0 else "0")
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_title(title, fontsize=9.5)
    return figure
