"""Three ways of an all-reduce over two nodes and one cable, as a picture.

two_node_routes()

Orange arrows cross the cable. A ring that jumps between the nodes crosses it twice each way, one
that keeps neighbours together once, and the hierarchy carries only finished shares across.
"""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Circle, FancyBboxPatch

from labsupport.plots.style import COLOURS, INK, QUIET, LabFigure, blank, new_figure, styled

SPOTS = {0: (0.0, 1.4), 1: (0.0, 0.0), 2: (2.6, 1.4), 3: (2.6, 0.0)}
"""Rank -> place; ranks 0 and 1 are node 0, ranks 2 and 3 node 1."""
CROSSING = ((0, 2), (2, 1), (1, 3), (3, 0))
SIDE_BY_SIDE = ((0, 1), (1, 2), (2, 3), (3, 0))
INSIDE = ((0, 1), (1, 0), (2, 3), (3, 2))
ACROSS = ((0, 2), (2, 0), (1, 3), (3, 1))
ON_CABLE = COLOURS[1]


@styled
def two_node_routes() -> LabFigure:
    """Who sends to whom on each route, and how often that crosses the cable."""
    panels = (
        ("ring, every hop crosses", CROSSING, "crosses twice each way"),
        ("ring, nodes side by side", SIDE_BY_SIDE, "crosses once each way"),
        ("hierarchy", (*INSIDE, *ACROSS), "each rank sends its half across"),
    )
    figure, all_axes = new_figure(
        columns=3,
        height_in=2.4,
        alt="; ".join(f"{name}: {words}" for name, _, words in panels),
    )
    for axes, (name, hops, words) in zip(all_axes, panels, strict=True):
        _nodes(axes)
        for start, end in hops:
            _hop(axes, start, end, both_ways=(end, start) in hops)
        axes.text(1.3, -1.2, words, ha="center", va="top", color=ON_CABLE)
        axes.set_title(name, loc="center", fontsize=9.5)
        axes.set_xlim(-0.95, 3.55)
        axes.set_ylim(-1.6, 2.2)
    return figure


def _nodes(axes: Any) -> None:
    blank(axes)
    for node, x in enumerate((0.0, 2.6)):
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.5, -0.5),
                1.0,
                2.4,
                boxstyle="round,pad=0.12",
                facecolor="#F4F4F4",
                edgecolor=QUIET,
                linewidth=1,
            )
        )
        axes.text(x, -0.68, f"node {node}", ha="center", va="top", color=QUIET, fontsize=8.5)
    for rank, (x, y) in SPOTS.items():
        axes.add_patch(
            Circle((x, y), 0.34, facecolor=COLOURS[rank], alpha=0.55, linewidth=0, zorder=2)
        )
        axes.text(x, y, str(rank), ha="center", va="center", zorder=3)


def _hop(axes: Any, start: int, end: int, *, both_ways: bool) -> None:
    """An arrow between two ranks, beside its twin where there is one back."""
    crosses = start // 2 != end // 2
    axes.annotate(
        "",
        xy=SPOTS[end],
        xytext=SPOTS[start],
        arrowprops={
            "arrowstyle": "-|>",
            "color": ON_CABLE if crosses else INK,
            "linewidth": 1.7,
            "shrinkA": 13,
            "shrinkB": 13,
            "connectionstyle": f"arc3,rad={0.22 if both_ways else 0}",
        },
    )
