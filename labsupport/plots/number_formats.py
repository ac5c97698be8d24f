"""Number formats as pictures: bits and range, the numbers around a value, sums that stop to grow.

number_formats()
number_line(name="bf16", value=0.1)
running_sums({"bf16": [...], "fp32": [...]}, increment=1e-4)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from labsupport.plan.number_formats import FORMATS, NumberFormat
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    log_y_axis,
    new_figure,
    styled,
)

FORMAT_COLOURS = dict(
    zip(FORMATS, (COLOURS[0], COLOURS[1], COLOURS[2], *COLOURS[3:5]), strict=True)
)
NEIGHBOURS = 6


@styled
def number_formats() -> LabFigure:
    """Every format's bits, and the sizes that it can tell from 0 and from infinity."""
    names = list(FORMATS)
    figure, (left, right) = new_figure(
        columns=2,
        height_in=2.9,
        width_ratios=(1.15, 1),
        alt="; ".join(
            f"{f.name}: {f.exponent_bits} exponent and {f.mantissa_bits} mantissa bits, largest "
            f"{f.largest:.3g}"
            for f in FORMATS.values()
        ),
    )
    for row, name in enumerate(names):
        _bits(left, FORMATS[name], row)
        _range(right, FORMATS[name], row)
    left.set_xlim(-0.3, 32.3)
    left.set_xticks([])
    left.set_title("grey: sign   dark: exponent   light: mantissa", fontsize=9, fontweight="normal")
    left.set_yticks(range(len(names)), names)
    right.set_xlim(-47, 52)
    right.set_xticks([-40, -20, 0, 20, 40], ["1e-40", "1e-20", "1", "1e20", "1e40"])
    right.set_title("range, to the largest (pale: fewer digits)", fontsize=9, fontweight="normal")
    right.set_yticks(range(len(names)), [""] * len(names))
    for axes in (left, right):
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
    left.grid(visible=False)
    return figure


def _bits(axes: Any, form: NumberFormat, row: int) -> None:
    colour = FORMAT_COLOURS[form.name]
    shades = [(QUIET, 0.5)] + [(colour, 0.9)] * form.exponent_bits
    shades += [(colour, 0.3)] * form.mantissa_bits
    for place, (shade, alpha) in enumerate(shades):
        axes.add_patch(
            Rectangle((place + 0.06, row - 0.3), 0.88, 0.6, color=shade, alpha=alpha, lw=0)
        )


def _range(axes: Any, form: NumberFormat, row: int) -> None:
    colour = FORMAT_COLOURS[form.name]
    least, normal, most = map(math.log10, (form.smallest, form.smallest_normal, form.largest))
    axes.barh(row, normal - least, left=least, height=0.5, color=colour, alpha=0.3)
    axes.barh(row, most - normal, left=normal, height=0.5, color=colour, alpha=0.9)
    axes.annotate(
        f"{form.largest:,.0f}" if form.largest < 1e6 else f"{form.largest:.1e}".replace("+", ""),
        xy=(most, row),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=QUIET,
    )


@styled
def number_line(*, name: str = "bf16", value: float = 0.1) -> LabFigure:
    """The numbers of one format around `value`, and the one that it becomes."""
    if name not in FORMATS or not value > 0:
        raise ValueError(
            f"{name=} must be one of {', '.join(FORMATS)}, {value=} above 0; 0.1 works"
        )
    form = FORMATS[name]
    near = form.round(value)
    numbers = form.neighbours(value, NEIGHBOURS)
    error = abs(near - value) / value
    says = f"becomes {near:.7g}" if math.isfinite(near) else "is beyond the largest: infinity"
    figure, axes = new_figure(height_in=1.9, alt=f"{value:g} in {name} {says}")
    colour = FORMAT_COLOURS[name]
    axes.vlines(numbers, -0.5, 0.5, color=colour, linewidth=2)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    if numbers[0] <= value <= numbers[-1]:
        axes.plot([value], [0], "o", color=INK, markersize=7)
        axes.plot([near], [0.5], "v", color=colour, markersize=9)
    tail = f", {error:.2%} off" if math.isfinite(near) else ""
    axes.set_title(f"{value:.6g} in {name} {says}{tail}")
    at = min(value, form.largest)
    axes.set_xlabel(f"the numbers of {name} near {at:.4g}: {form.spacing_at(at):.3g} apart there")
    axes.set_ylim(-0.8, 0.9)
    axes.set_yticks([])
    ticks = numbers[:: max(1, len(numbers) // 3)]
    axes.set_xticks(ticks, [f"{tick:.6g}" for tick in ticks])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return figure


@styled
def running_sums(sums: Mapping[str, Sequence[float]], *, increment: float) -> LabFigure:
    """Sum after each addition of `increment`, by format; dotted: where it is predicted to stall."""
    if not sums or any(name not in FORMATS for name in sums):
        raise ValueError(f"sums must be by format ({', '.join(FORMATS)}); {{'bf16': [0.1]}} works")
    figure, axes = new_figure(
        height_in=3.4,
        alt="; ".join(f"{name} ends at {values[-1]:.4g}" for name, values in sums.items()),
    )
    ends = {}
    for name, values in sums.items():
        colour = FORMAT_COLOURS[name]
        steps = range(1, len(values) + 1)
        stall = FORMATS[name].stalls_at(increment)
        axes.plot(steps, values, color=colour)
        if 0 < stall < increment * len(values):
            axes.axhline(stall, color=colour, linestyle=":", linewidth=1)
        if values[-1] > 0:
            ends[f"{name}: {values[-1]:.4g}"] = (float(len(values)), values[-1], colour)
    axes.set_xscale("log")
    powers = range(math.ceil(math.log10(max(map(len, sums.values())))) + 1)
    axes.set_xticks([10**power for power in powers], [f"{10**power:,}" for power in powers])
    axes.xaxis.set_minor_locator(NullLocator())
    log_y_axis(axes, lambda tick: f"{tick:g}")
    axes.set_xlabel(f"additions of {increment:g}")
    axes.set_ylabel("sum")
    axes.set_title("A sum in each type (dotted: predicted end)")
    label_line_ends(axes, ends)
    return figure
