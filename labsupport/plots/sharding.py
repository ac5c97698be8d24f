"""Sharded data parallel: who holds what, the ladder of bytes per rank, and what travels instead.

sharding_stages(world_size=4)
sharding_ladder({"ddp": {1: plan.fullest.bytes_of, 2: …}, "zero1": …}, measured=…)
exchanged_by_stage({"ddp": plan.exchanges, …}, unit_bytes=gradient_bytes)
weights_over_step({"freed after the forward": timeline, "kept": …})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from labsupport.plan.sharding import Exchange
from labsupport.plots.memory import CATEGORY_COLOURS, SampleLike, TimelineLike
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

Ladder = Mapping[str, Mapping[int, Mapping[str, int]]]
"""Stage -> world size -> category -> bytes of one rank."""
_STATES = ("parameters", "gradients", "optimizer", "copies")
_WEIGHTS = ("parameters", "gathered", "buffers")
_DIVIDED = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
"""How many of the states are divided: first the optimizer's, then gradients, then parameters."""
_COLLECTIVES = {"all_reduce": COLOURS[4], "reduce_scatter": COLOURS[1], "all_gather": COLOURS[0]}
"""Gradients in their colour, weights in theirs."""


@styled
def sharding_stages(*, world_size: int = 4) -> LabFigure:
    """A column a stage, a bar a state, cut by rank: filled is what rank 1 holds of it."""
    if not 2 <= world_size <= 8:
        raise ValueError(f"{world_size=} must be between 2 and 8, for example 4")
    figure, axes = new_figure(
        height_in=1.9,
        alt="ddp: every rank holds all; zero1: the optimizer's state is divided; zero2: gradients "
        "too; zero3: parameters too",
    )
    rows = ("parameters", "gradients", "optimizer")
    for column, (stage, divided) in enumerate(_DIVIDED.items()):
        left = 5.0 * column
        axes.text(left, 3.25, stage, va="bottom", weight="bold")
        for row, state in enumerate(rows):
            is_divided = row >= len(rows) - divided
            for rank in range(world_size):
                holds = not is_divided or rank == 1
                width = 4.2 / world_size
                axes.add_patch(
                    Rectangle(
                        (left + rank * width, 2.2 - row),
                        width,
                        0.72,
                        facecolor=CATEGORY_COLOURS[state] if holds else "white",
                        edgecolor=QUIET,
                        linewidth=0.8,
                    )
                )
    for row, state in enumerate(rows):
        axes.text(-0.3, 2.56 - row, state, ha="right", va="center")
    axes.text(0, -0.2, f"Filled: what rank 1 of {world_size} holds.", va="top", color=QUIET)
    axes.set_xlim(-3.6, 19.3)
    axes.set_ylim(-0.9, 4.0)
    axes.set_axis_off()
    return figure


@styled
def sharding_ladder(
    predicted: Ladder,
    *,
    measured: Ladder | None = None,
    limit_bytes: float | None = None,
    title: str = "Bytes held by the fullest rank",
) -> LabFigure:
    """A group a stage, a stacked bar a world size; measured: a line at the top of each part."""
    if not predicted or not all(predicted.values()):
        raise ValueError("no bars; {'ddp': {1: plan.fullest.bytes_of}} works")
    tops = [sum(held.values()) for bars in predicted.values() for held in bars.values()]
    size, unit = _unit(max(tops))
    used = [s for s in _STATES if any(h.get(s) for b in predicted.values() for h in b.values())]
    figure, axes = new_figure(height_in=3.7, alt=f"{title}: {_in_words(predicted)}")
    at, ticks, labels, crowded = 0.0, [], [], len(tops) > 12
    for stage, bars in predicted.items():
        first = at
        for world_size, held in bars.items():
            _stack(axes, at, [held.get(s, 0) / size for s in used], used)
            counted = (measured or {}).get(stage, {}).get(world_size)
            if counted is not None:
                for height in accumulate(counted.get(s, 0) / size for s in used):
                    axes.plot([at - 0.46, at + 0.46], [height, height], color=INK, linewidth=1.5)
            total = sum(held.values()) / size
            text = f"{total:.0f}" if total >= 10 and crowded else f"{total:.3g}"
            axes.annotate(
                text, (at, total), (0, 3), textcoords="offset points", ha="center", fontsize=8.5
            )
            ticks.append(at)
            labels.append(str(world_size))
            at += 1
        name = {"ha": "center", "va": "top", "weight": "bold"}
        transform = axes.get_xaxis_transform()
        axes.text((first + at - 1) / 2, -0.13, stage, transform=transform, **name)
        at += 0.7
    if limit_bytes is not None:
        axes.axhline(limit_bytes / size, color=INK, linewidth=1.4, linestyle="--")
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("ranks, and stage", labelpad=26)
    axes.set_ylim(0, max(max(tops), min(limit_bytes or 0, 1.5 * max(tops))) / size * 1.12)
    axes.set_ylabel(f"{unit}, predicted")
    axes.set_title(title)
    axes.grid(axis="x", visible=False)
    extra = [Line2D([], [], color=INK, label="measured")] if measured else []
    _legend(figure, {s: CATEGORY_COLOURS[s] for s in used}, extra)
    return figure


@styled
def exchanged_by_stage(
    exchanges: Mapping[str, Sequence[Exchange]],
    *,
    unit_bytes: float,
    counted: Mapping[str, float] | None = None,
) -> LabFigure:
    """What a rank sends in a step, a bar a stage, in multiples of `unit_bytes` (the gradients).

    `counted` gives a stage's measured bytes, drawn as a line.
    """
    if not exchanges or unit_bytes <= 0:
        raise ValueError(f"{unit_bytes=} must be above 0 and exchanges not empty")
    sent = {stage: sum(one.link_bytes for one in all_) for stage, all_ in exchanges.items()}
    figure, axes = new_figure(
        height_in=1.3 + 0.42 * len(exchanges),
        alt="Sent by a rank, in gradients: "
        + ", ".join(f"{stage} {value / unit_bytes:.2f}" for stage, value in sent.items()),
    )
    for row, (stage, all_) in enumerate(exchanges.items()):
        left = 0.0
        for one in all_:
            width = one.link_bytes / unit_bytes
            colour = _COLLECTIVES[one.collective]
            axes.barh(row, width, left=left, height=0.62, color=colour, edgecolor="white")
            left += width
        if counted and stage in counted:
            x = counted[stage] / unit_bytes
            axes.plot([x, x], [row - 0.42, row + 0.42], color=INK, linewidth=1.6)
        axes.annotate(f"{left:.2f}", (left, row), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(exchanges)), list(exchanges))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(sent.values()) / unit_bytes * 1.12)
    axes.set_xlabel(f"sent by a rank in a step, predicted, in gradients ({size_label(unit_bytes)})")
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_color(FAINT)
    used = {one.collective for all_ in exchanges.values() for one in all_}
    colours = {name: colour for name, colour in _COLLECTIVES.items() if name in used}
    extra = [Line2D([], [], color=INK, label="counted")] if counted else []
    _legend(figure, colours, extra)
    return figure


@styled
def weights_over_step(timelines: Mapping[str, TimelineLike], *, step: int = 2) -> LabFigure:
    """The saw-tooth: shards, gathered weights and what arrives, a panel for each timeline."""
    if not timelines:
        raise ValueError("no timelines; {'freed': tracker.timeline()} works")
    chosen = {n: [s for s in t.samples if s.step == step] for n, t in timelines.items()}
    tops = {n: max(_weights(sample) for sample in samples) for n, samples in chosen.items()}
    size, unit = _unit(max(tops.values()))
    figure, grid = new_figure(
        rows=len(timelines),
        height_in=0.9 + 1.45 * len(timelines),
        alt="Weights held by a rank during a step: "
        + "; ".join(f"{name}: {size_label(top)} at most" for name, top in tops.items()),
    )
    for axes, (name, samples) in zip(
        [grid] if len(timelines) == 1 else grid, chosen.items(), strict=True
    ):
        axes.stackplot(
            range(len(samples)),
            [[s.bytes_of.get(kind, 0) / size for s in samples] for kind in _WEIGHTS],
            colors=[CATEGORY_COLOURS[kind] for kind in _WEIGHTS],
            linewidth=0,
        )
        for i in range(1, len(samples)):
            if samples[i].phase != samples[i - 1].phase:
                axes.axvline(i, color=QUIET, linewidth=0.8, linestyle=":")
        for phase in ("forward", "backward"):
            inside = [i for i, sample in enumerate(samples) if sample.phase == phase]
            if inside:
                middle = (inside[0] + inside[-1]) / 2
                axes.text(middle, max(tops.values()) / size * 1.14, phase, ha="center", color=QUIET)
        axes.set_xlim(0, len(samples))
        axes.set_ylim(0, max(tops.values()) / size * 1.32)
        axes.set_xticks([])
        axes.set_ylabel(unit)
        axes.set_title(f"{name}: {size_label(tops[name])} at most (measured)", fontsize=9.5)
    labels = {"parameters": "own shards", "gathered": "gathered", "buffers": "arriving"}
    _legend(figure, {label: CATEGORY_COLOURS[kind] for kind, label in labels.items()}, [])
    return figure


def _weights(sample: SampleLike) -> int:
    return sum(sample.bytes_of.get(kind, 0) for kind in _WEIGHTS)


def _stack(axes: Any, x: float, heights: Sequence[float], states: Sequence[str]) -> None:
    bottom = 0.0
    for height, state in zip(heights, states, strict=True):
        axes.bar(x, height, bottom=bottom, width=0.78, color=CATEGORY_COLOURS[state])
        bottom += height


def _in_words(ladder: Ladder) -> str:
    return "; ".join(
        f"{stage} " + ", ".join(f"{size_label(sum(h.values()))} at {n}" for n, h in bars.items())
        for stage, bars in ladder.items()
    )


def _unit(largest_bytes: float) -> tuple[int, str]:
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((size, unit) for size, unit in units if largest_bytes >= size), units[-1])


def _legend(figure: LabFigure, colours: Mapping[str, str], extra: Sequence[Any]) -> None:
    figure.legend(
        handles=[*(Patch(color=c, label=name) for name, c in colours.items()), *extra],
        loc="outside lower center",
        ncols=8,
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
    )
