"""The roads between the ranks of one machine, drawn.

    topology(measure.topology.this_machine())

A box is a NUMA node, with its GPUs, network cards or CPU cores. Lines join GPUs (and cards) that
are nearer than "across the sockets"; where all pairs of GPUs have the same path, a bar stands for
all lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from matplotlib.patches import FancyBboxPatch

from labsupport.plots.style import COLOURS, INK, QUIET, LabFigure, blank, new_figure, styled


class Place(Protocol):
    """As in measure.topology."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def group(self) -> str: ...


class Route(Protocol):
    """As in measure.topology."""

    @property
    def first(self) -> str: ...
    @property
    def second(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def meaning(self) -> str: ...


class Machine(Protocol):
    """`measure.topology.Topology`."""

    @property
    def places(self) -> Sequence[Place]: ...
    @property
    def paths(self) -> Sequence[Route]: ...
    @property
    def source(self) -> str: ...
    @property
    def groups(self) -> Sequence[str]: ...


KIND_COLOUR = {"gpu": "#8FD3BF", "nic": "#F2CE85", "core": "#A9D8F3"}
PER_ROW = {"gpu": 4, "nic": 4, "core": 8}
"""Places side by side in a group's box before a new row starts."""
STEP_X, STEP_Y = 1.5, 1.2
FEW_PAIRS = 6
"""Up to so many pairs of GPUs get a line each."""

Spot = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The rectangle of one NUMA node."""

    x: float
    width: float
    height: float


@styled
def topology(machine: Machine) -> LabFigure:
    """GPUs, network cards or cores by NUMA node, and the kinds of path between them."""
    if not machine.places:
        raise ValueError("a machine without places cannot be drawn; this_machine() works")
    where, frames = _layout(machine)
    kinds = _kinds(machine)
    top = max(frame.height for frame in frames.values())
    width = max(frame.x + frame.width for frame in frames.values())
    beside = width < 5  # room for the words right of a small machine, else below
    words_x, words_y = (width + 0.7, top - 0.3) if beside else (0.1, -0.65)
    lines = max(1, len(kinds)) + 1
    bottom = min(0.0, words_y - 0.55 * lines) - 0.25
    right = max(width, 9.0)
    bar = _common_kind(machine)
    head = top + (1.0 if bar else 0.35)
    figure, axes = new_figure(
        height_in=0.4 + (head - bottom) * 7.3 / (right + 0.6),
        alt=f"{len(machine.places)} places in {len(frames)} NUMA nodes; "
        + "; ".join(f"{kind}: {meaning}" for kind, (meaning, _) in kinds.items()),
    )
    blank(axes)
    for group, frame in frames.items():
        _group(axes, group or "node unknown", frame)
    _bridges(axes, list(frames.values()), kinds)
    _paths(axes, machine, where, kinds, top)
    for place in machine.places:
        _place(axes, place, where[place.name])
    _words(axes, machine, kinds, words_x, words_y)
    axes.set_xlim(-0.3, right + 0.3)
    axes.set_ylim(bottom, head)
    axes.set_title("What joins the ranks of this machine")
    return figure


def _layout(machine: Machine) -> tuple[dict[str, Spot], dict[str, _Frame]]:
    """Centre of each place, and the frame of each group, side by side, GPUs in the top row."""
    rows_of: dict[str, list[list[Place]]] = {}
    for group in machine.groups:
        rows: list[list[Place]] = []
        for kind in ("gpu", "core", "nic"):  # from the top down
            members = [p for p in machine.places if p.group == group and p.kind == kind]
            rows += [members[i : i + PER_ROW[kind]] for i in range(0, len(members), PER_ROW[kind])]
        rows_of[group] = rows
    height = max(len(rows) for rows in rows_of.values()) * STEP_Y + 0.5
    where: dict[str, Spot] = {}
    frames: dict[str, _Frame] = {}
    left = 0.0
    for group, rows in rows_of.items():
        width = max(max(len(row) for row in rows) * STEP_X, 2.4)
        for down, row in enumerate(rows):
            start = left + (width - len(row) * STEP_X) / 2
            for column, place in enumerate(row):
                x = start + (column + 0.5) * STEP_X
                where[place.name] = (x, height - (down + 0.5) * STEP_Y)
        frames[group] = _Frame(x=left, width=width, height=height)
        left += width + 0.8
    return where, frames


def _kinds(machine: Machine) -> dict[str, tuple[str, str]]:
    """kind -> (meaning, colour) of the kinds that get drawn, nearest first."""
    kinds = dict.fromkeys((path.kind, path.meaning) for path in machine.paths if _is_drawn(path))
    ordered = sorted(kinds, key=lambda pair: (not pair[0].startswith("NV"), pair[0] == "SYS"))
    colours = (COLOURS[0], COLOURS[1], COLOURS[3], COLOURS[6], COLOURS[7])
    return {
        kind: (meaning, QUIET if kind == "SYS" else colours[i % len(colours)])
        for i, (kind, meaning) in enumerate(ordered)
    }


def _is_drawn(path: Route) -> bool:
    """Between GPUs or cores always; to a network card only where it is near; never card to card."""
    cards = sum(name.startswith("NIC") for name in (path.first, path.second))
    near = path.kind in ("PIX", "PXB", "PHB")
    return cards == 0 or (cards == 1 and (near or path.kind == "SYS"))


def _paths(
    axes: Any,
    machine: Machine,
    where: dict[str, Spot],
    kinds: dict[str, tuple[str, str]],
    top: float,
) -> None:
    """A bar where all pairs of GPUs are alike, else a line a pair; `SYS` is left to the bridges."""
    drawn = [path for path in machine.paths if _is_drawn(path) and path.kind != "SYS"]
    gpus = [path for path in drawn if path.first[:3] == path.second[:3] == "GPU"]
    if common := _common_kind(machine):
        spots = [where[place.name] for place in machine.places if place.kind == "gpu"]
        _bar(axes, spots, f"{common} between every two", kinds[common][1], top + 0.4)
        drawn = [path for path in drawn if path not in gpus]
    for path in drawn:
        start, end = where[path.first], where[path.second]
        neighbours = math.dist(start, end) <= STEP_X * 1.01
        if neighbours or (path.first.startswith("GPU") and len(gpus) <= FEW_PAIRS):
            _line(axes, start, end, kinds[path.kind][1])


def _common_kind(machine: Machine) -> str | None:
    """The kind of path between every two GPUs, where it is one kind and not across sockets."""
    gpus = {place.name for place in machine.places if place.kind == "gpu"}
    kinds = {path.kind for path in machine.paths if {path.first, path.second} <= gpus}
    return kinds.pop() if len(gpus) > 2 and len(kinds) == 1 and "SYS" not in kinds else None


def _bar(axes: Any, spots: Sequence[Spot], name: str, colour: str, y: float) -> None:
    """One bar above all spots, with a stub down to each: the picture of a switch."""
    xs = [x for x, _ in spots]
    for x, below in spots:
        axes.plot([x, x], [below, y], color=colour, linewidth=2, zorder=1)
    axes.plot([min(xs), max(xs)], [y, y], color=colour, linewidth=5, zorder=1)
    axes.text(max(xs), y + 0.12, name, ha="right", va="bottom")


def _bridges(axes: Any, frames: Sequence[_Frame], kinds: dict[str, tuple[str, str]]) -> None:
    """The link between the sockets: one bar from each node's frame to the next."""
    if "SYS" not in kinds:
        return
    for one, other in pairwise(frames):
        axes.plot(
            [one.x + one.width + 0.12, other.x - 0.12],
            [0.4, 0.4],
            color=kinds["SYS"][1],
            linewidth=6,
            solid_capstyle="butt",
            zorder=0,
        )


def _line(axes: Any, start: Spot, end: Spot, colour: str) -> None:
    """Straight between neighbours; an arc over whatever stands between in one row."""
    far = math.isclose(start[1], end[1]) and abs(start[0] - end[0]) > STEP_X * 1.1
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        zorder=1,
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 2.5,
            "connectionstyle": f"arc3,rad={-0.35 if far else 0}",
        },
    )


def _group(axes: Any, name: str, frame: _Frame) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (frame.x, 0),
            frame.width,
            frame.height,
            boxstyle="round,pad=0.12",
            facecolor="#F7F7F7",
            edgecolor=QUIET,
            zorder=0,
        )
    )
    axes.text(frame.x + 0.05, 0.02, name, va="bottom", color=QUIET, fontsize=9)


def _place(axes: Any, place: Place, at: Spot) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (at[0] - 0.5, at[1] - 0.25),
            1.0,
            0.5,
            boxstyle="round,pad=0.05",
            facecolor=KIND_COLOUR[place.kind],
            edgecolor=INK,
            linewidth=0.8,
            zorder=2,
        )
    )
    axes.text(at[0], at[1], place.name, ha="center", va="center", zorder=3, fontsize=9)


def _words(
    axes: Any, machine: Machine, kinds: dict[str, tuple[str, str]], x: float, y: float
) -> None:
    """What each colour is, and what was read."""
    for line, (kind, (meaning, colour)) in enumerate(kinds.items()):
        height = y - 0.55 * line
        axes.plot([x, x + 0.6], [height, height], color=colour, linewidth=4, solid_capstyle="butt")
        axes.text(x + 0.8, height, f"{kind}: {meaning}", va="center")
    if not kinds:
        axes.text(x, y, "one alone: there is nothing to join", va="center")
    source_y = y - 0.55 * max(1, len(kinds))
    axes.text(x, source_y, f"read from {machine.source}", color=QUIET, va="center", fontsize=9)
