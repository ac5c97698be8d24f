"""A training step on a time line: what each rank computed, what was under way, what it waited for.

    step_traces({"after the backward": before, "during the backward": after})

Two lanes a rank: computation above (forward pale, backward full, optimizer dark), messages below.
Messages are pale where computation hides them and black where they are exposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    new_figure,
    styled,
    time_label,
)

if TYPE_CHECKING:
    from labsupport.measure.trace import Span, Trace

LANE, GAP_OF_RANKS = 0.8, 2.5
MESSAGE = "#C9C9C9"
MOST_RANKS = 8


@styled
def step_traces(traces: Mapping[str, Trace]) -> LabFigure:
    """One panel a trace under its name, all on one time axis.

    Raises ValueError for no trace, or one of more than 8 ranks.
    """
    most = max((len(trace.ranks) for trace in traces.values()), default=0)
    if not 1 <= most <= MOST_RANKS:
        raise ValueError(
            f"traces of {most} ranks; 1 to {MOST_RANKS} can be drawn, for example "
            '{"two ranks": trace}'
        )
    figure, all_axes = new_figure(
        height_in=0.75 + sum(0.45 + 0.5 * len(trace.ranks) for trace in traces.values()),
        rows=len(traces),
        share_x=True,
        height_ratios=[1 + len(trace.ranks) for trace in traces.values()],
        alt="; ".join(_in_words(name, trace) for name, trace in traces.items()),
    )
    panels = [all_axes] if len(traces) == 1 else list(all_axes)
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        _draw_panel(axes, name, trace)
    last = panels[-1]
    last.set_xlim(0, 1.25 * max(trace.duration_s for trace in traces.values()))
    last.xaxis.set_major_locator(MaxNLocator(8))
    last.xaxis.set_major_formatter(FuncFormatter(lambda x, _: time_label(x) if x else "0"))
    _add_legend(figure)
    return figure


def _draw_panel(axes: Any, name: str, trace: Trace) -> None:
    """Lanes of every rank, rank 0 on top."""
    ticks = []
    for row, rank in enumerate(trace.ranks):
        y = -GAP_OF_RANKS * row
        for span in trace.spans:
            if span.rank == rank and span.stream == "compute":
                _bar(axes, [(span.start_s, span.end_s)], y, **_look_of(span))
            elif span.rank == rank:
                _bar(axes, [(span.start_s, span.end_s)], y - 1, facecolor=MESSAGE)
        _bar(axes, trace.exposed(rank), y - 1, facecolor=INK)
        arrivals = [s.end_s for s in trace.spans if s.rank == rank and s.stream != "compute"]
        axes.vlines(arrivals, y - 1 - LANE / 2, y - 1 + LANE / 2, color="white", linewidth=0.8)
        end_s = max(span.end_s for span in trace.spans if span.rank == rank)
        axes.text(end_s, y - 1, f"  {time_label(trace.exposed_s(rank))} exposed", va="center")
        ticks.append(y - 0.5)
    axes.set_yticks(ticks, [f"rank {rank}" for rank in trace.ranks])
    axes.set_ylim(ticks[-1] - 1.3, 0.8)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(name)


def _bar(axes: Any, intervals: list[tuple[float, float]], y: float, **look: Any) -> None:
    axes.broken_barh([(a, b - a) for a, b in intervals], (y - LANE / 2, LANE), **look)


def _look_of(span: Span) -> dict[str, Any]:
    """The rank's colour; the phase by its strength."""
    colour = COLOURS[span.rank % len(COLOURS)]
    edge = {"edgecolor": "white", "linewidth": 0.4}
    if span.name.endswith("backward"):
        return {"facecolor": colour, "alpha": 0.85, **edge}
    if span.name == "optimizer":
        return {"facecolor": QUIET, **edge}
    return {"facecolor": colour, "alpha": 0.35, **edge}


def _add_legend(figure: LabFigure) -> None:
    entries = [
        Patch(facecolor=COLOURS[0], alpha=0.35, label="forward, loss"),
        Patch(facecolor=COLOURS[0], alpha=0.85, label="backward"),
        Patch(facecolor=QUIET, label="optimizer"),
        Patch(facecolor=MESSAGE, label="messages, hidden"),
        Patch(facecolor=INK, label="messages, exposed"),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)


def _in_words(name: str, trace: Trace) -> str:
    exposed = ", ".join(f"rank {r} {time_label(trace.exposed_s(r))}" for r in trace.ranks)
    return f"{name}: a step of {time_label(trace.duration_s)}, exposed communication {exposed}"
