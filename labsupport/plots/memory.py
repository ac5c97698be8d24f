"""Memory: when each kind of bytes is held, a measured step as a stacked time line, stacked bars.

memory_lifetimes()
memory_timeline(tracker.timeline())
memory_bars({"predicted": plan.bytes_of, "measured": timeline.peak(step=2).bytes_of})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.patches import Patch

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

CATEGORY_COLOURS = {
    "parameters": COLOURS[0],
    "optimizer": COLOURS[6],
    "gradients": COLOURS[1],
    "gathered": "#9BB8D3",
    "copies": COLOURS[5],
    "activations": COLOURS[2],
    "logits": COLOURS[4],
    "temporary": COLOURS[3],
    "inputs": COLOURS[7],
    "buffers": "#9A9A9A",
}
"""From the bottom of a stack to its top, in the order of measure.memory_timeline."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_PHASES = ("forward", "backward", "update", "after")
_LIVES: dict[
    str, list[tuple[float, float]]
] = {  # (quarter of the step, height): a slope where tensors come or go one by one
    "parameters": [(0, 1), (4, 1)],
    "optimizer": [(0, 1), (4, 1)],
    "gradients": [(1, 0), (2, 1), (3, 1), (3, 0)],
    "copies": [(0, 0), (1, 1), (2, 0)],
    "activations": [(0, 0), (1, 1), (2, 0)],
    "logits": [(0.9, 0), (0.9, 1), (1.1, 1), (1.1, 0)],
}


class SampleLike(Protocol):
    """A moment of measure.memory_timeline."""

    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def bytes_of(self) -> Mapping[str, int]: ...
    @property
    def total_bytes(self) -> int: ...


class TimelineLike(Protocol):
    """A measure.memory_timeline.MemoryTimeline."""

    @property
    def samples(self) -> Sequence[SampleLike]: ...


@styled
def memory_lifetimes() -> LabFigure:
    """Which kind of bytes is held in which phase of a step; a slope where they come or go."""
    figure, axes = new_figure(
        height_in=2.9,
        alt="Parameters and optimizer state are held all the time; activations are made in the "
        "forward pass and freed in the backward pass, in which gradients come; they go at "
        "zero_grad; logits stand at the turn",
    )
    for row, (name, outline) in enumerate(_LIVES.items()):
        bottom = 5.0 - row
        x = [quarter for quarter, _ in outline]
        top = [bottom + 0.72 * height for _, height in outline]
        axes.fill_between(x, bottom, top, color=CATEGORY_COLOURS[name], alpha=0.8, linewidth=0)
    axes.set_yticks([5.3 - row for row in range(6)], list(_LIVES))
    axes.tick_params(axis="y", length=0)
    names = ("forward", "backward", "update", "zero_grad")
    for quarter, name in enumerate(names):
        axes.axvline(quarter, color=QUIET, linewidth=0.8, linestyle=":")
        axes.text(quarter + 0.5, 6.0, name, ha="center", va="bottom", color=INK)
    axes.set_xlim(0, 4)
    axes.set_ylim(0, 6.6)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


@styled
def memory_timeline(
    timeline: TimelineLike, *, title: str = "Bytes held, tensor by tensor (measured)"
) -> LabFigure:
    """All samples of a tracker, stacked by category; phases and the peak of each step marked."""
    samples = timeline.samples
    if not samples:
        raise ValueError("an empty timeline; track a step first: with MemoryTracker(…) as memory")
    peaks = _peaks(samples)
    unit, size = _unit(max(sample.total_bytes for sample in samples))
    used = _visible([s.bytes_of for s in samples])
    figure, axes = new_figure(
        height_in=3.9,
        alt=f"{title}: "
        + "; ".join(
            f"step {samples[i].step} is fullest in {samples[i].phase}, "
            f"{size_label(samples[i].total_bytes)}"
            for i in peaks
        ),
    )
    layers = [[s.bytes_of.get(c, 0) / size for s in samples] for c in used]
    axes.stackplot(
        range(len(samples)),
        layers,
        colors=[CATEGORY_COLOURS[c] for c in used],
        labels=used,
        alpha=0.85,
        linewidth=0,
    )
    top = max(sample.total_bytes for sample in samples) / size
    _mark_phases(axes, samples, top)
    for i in peaks:
        height = samples[i].total_bytes / size
        axes.plot([i], [height], "v", color=INK, markersize=6)
        right = i > 0.8 * len(samples)
        axes.annotate(
            f"{height:.4g} {unit}",
            xy=(i, height),
            xytext=(-7 if right else 7, 1),
            textcoords="offset points",
            ha="right" if right else "left",
        )
    axes.set_xlim(0, len(samples))
    axes.set_ylim(0, top * 1.3)
    axes.set_ylabel(unit)
    axes.set_xlabel("tensors made and freed, in order (not time)")
    axes.set_title(title)
    axes.grid(axis="x", visible=False)
    _legend(figure, used)
    return figure


def _peaks(samples: Sequence[SampleLike]) -> list[int]:
    """Index of the fullest sample of each step."""
    best: dict[int, int] = {}
    for i, sample in enumerate(samples):
        if sample.total_bytes > samples[best.setdefault(sample.step, i)].total_bytes:
            best[sample.step] = i
    return list(best.values())


def _mark_phases(axes: Any, samples: Sequence[SampleLike], top: float) -> None:
    starts = [
        i
        for i in range(1, len(samples))
        if (samples[i].phase, samples[i].step) != (samples[i - 1].phase, samples[i - 1].step)
    ]
    for i, end in zip(starts, [*starts[1:], len(samples)], strict=True):
        axes.axvline(i, color=QUIET, linewidth=0.7, linestyle=":")
        if samples[i].phase in _PHASES and end - i > 0.07 * len(samples):
            axes.text(
                (i + end) / 2, top * 1.21, samples[i].phase, ha="center", va="bottom", color=QUIET
            )
        if samples[i].step != samples[i - 1].step:
            axes.axvline(i, color=INK, linewidth=1.2)


@styled
def memory_bars(
    bars: Mapping[str, Mapping[str, int]],
    *,
    limit_bytes: float | None = None,
    title: str = "",
) -> LabFigure:
    """A stacked bar for each entry, name -> category -> bytes; `limit_bytes` is drawn as a line."""
    if not bars:
        raise ValueError("no bars; {'predicted': plan.bytes_of} works")
    totals = {name: sum(held.values()) for name, held in bars.items()}
    unit, size = _unit(max(*totals.values(), 1))
    used = _visible(list(bars.values()))
    figure, axes = new_figure(
        height_in=1.5 + 0.52 * len(bars),
        alt="; ".join(
            f"{name}: {size_label(totals[name])}, most of it {max(held, key=lambda c: held[c])}"
            for name, held in bars.items()
        ),
    )
    widest = max(max(totals.values()), limit_bytes or 0) / size
    for row, (name, held) in enumerate(bars.items()):
        left = 0.0
        for category in used:
            width = held.get(category, 0) / size
            axes.barh(row, width, left=left, height=0.66, color=CATEGORY_COLOURS[category])
            if width > 0.075 * widest:
                middle = left + width / 2
                if limit_bytes and abs(middle - limit_bytes / size) < 0.04 * widest < width / 4:
                    middle += 0.05 * widest  # not across the dashed line
                axes.text(middle, row, f"{width:.3g}", ha="center", va="center", color="white")
            left += width
        axes.text(left + 0.012 * widest, row, f"{totals[name] / size:.4g}", ha="left", va="center")
    if limit_bytes is not None:
        axes.axvline(limit_bytes / size, color=INK, linewidth=1.4, linestyle="--")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.14)
    axes.set_xlabel(unit)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_color(FAINT)
    axes.set_title(title)
    _legend(figure, used)
    return figure


def _visible(states: Sequence[Mapping[str, int]]) -> list[str]:
    """Categories that are ever as much as half a percent of the fullest state."""
    threshold = max(sum(held.values()) for held in states) / 200
    return [c for c in CATEGORY_COLOURS if any(held.get(c, 0) >= threshold for held in states)]


def _unit(largest_bytes: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if largest_bytes >= size), _UNITS[-1])


def _legend(figure: LabFigure, categories: Sequence[str]) -> None:
    figure.legend(
        handles=[Patch(color=CATEGORY_COLOURS[c], label=c) for c in categories],
        loc="outside lower center",
        ncols=min(len(categories), 8),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.1,
        handletextpad=0.5,
    )
