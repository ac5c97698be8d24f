"""Precision as pictures: the scaler's trace, bytes by type, errors of sums, rates of GPUs.

scaler_trace([train_step(...), ...])
bytes_by_type({"fp32": kept_types(...), "bf16": kept_types(...)})
sum_errors({"bf16": {2: 2e-3, 4: 3e-3}}, predicted={"bf16": {...}})
rates_by_type({"H100": {"fp32": 67e12, "bf16": 989e12}})
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    log_y_axis,
    new_figure,
    size_label,
    styled,
)

_COLOUR = {"fp32": COLOURS[0], "bf16": COLOURS[1], "fp16": COLOURS[2], "fp8": COLOURS[3]}
TYPE_COLOURS = {  # by torch's names, those of number_formats too
    "float32": _COLOUR["fp32"],
    "bfloat16": _COLOUR["bf16"],
    "float16": _COLOUR["fp16"],
    "float8_e4m3fn": _COLOUR["fp8"],
}


class Step(Protocol):
    """What `train_step` returns."""

    @property
    def loss_scale(self) -> float: ...
    @property
    def skipped(self) -> bool: ...


class KeptLine(Protocol):
    """A line of `train.kept_types`."""

    @property
    def what(self) -> str: ...
    @property
    def num_bytes(self) -> Mapping[str, int]: ...
    @property
    def total_bytes(self) -> int: ...


class KeptTable(Protocol):
    """What `train.kept_types` returns."""

    @property
    def kept(self) -> Sequence[KeptLine]: ...


@styled
def scaler_trace(
    steps: Sequence[Step], *, title: str = "The loss scale, step by step"
) -> LabFigure:
    """Loss scale of every step; a cross where the gradient overflowed and the step was skipped."""
    if not steps:
        raise ValueError("steps is empty; a list of what train_step returned works")
    skipped = [i for i, step in enumerate(steps) if step.skipped]
    figure, axes = new_figure(
        height_in=3.0, alt=f"{title}: {len(skipped)} of {len(steps)} steps skipped"
    )
    scales = [math.log2(step.loss_scale) for step in steps]
    axes.step(range(len(steps)), scales, where="mid", color=COLOURS[0])
    taken = [i for i in range(len(steps)) if i not in skipped]
    axes.plot(taken, [scales[i] for i in taken], "o", color=COLOURS[0], label="step taken")
    marks = [scales[i] for i in skipped]
    axes.plot(skipped, marks, "X", color=COLOURS[1], markersize=8, label="overflow: step skipped")
    low, high = math.floor(min(scales)), math.ceil(max(scales))
    stride = max(1, (high - low) // 5)
    ticks = range(low, high + 1, stride)
    axes.set_yticks(ticks, [f"2^{tick}" for tick in ticks])
    axes.set_ylim(low - 0.7, high + 0.7)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.set_title(title)
    axes.legend(frameon=False, loc="upper right")
    return figure


@styled
def bytes_by_type(tables: Mapping[str, KeptTable]) -> LabFigure:
    """What each recipe keeps in memory: a bar a recipe, cut by what it is, coloured by type."""
    if not tables:
        raise ValueError("tables is empty; {'fp32': kept_types(...)} works")
    wanted = (
        "parameters",
        "gradients",
        "optimizer moments",
        "narrow copies of weights",
        "activations",
    )
    totals = {
        name: sum(line.total_bytes for line in table.kept if line.what in wanted)
        for name, table in tables.items()
    }
    figure, axes = new_figure(
        height_in=1.2 + 0.55 * len(tables),
        alt="; ".join(f"{name}: {size_label(total)}" for name, total in totals.items()),
    )
    most, used = max(totals.values()), dict[str, str]()
    for row, (name, table) in enumerate(tables.items()):
        left = 0.0
        lines = {line.what: line for line in table.kept}
        for what in (what for what in wanted if what in lines):
            start = left
            for dtype, size in sorted(lines[what].num_bytes.items()):
                if dtype not in TYPE_COLOURS:
                    continue  # the labels: whole numbers, and few
                used[dtype] = TYPE_COLOURS[dtype]
                axes.barh(row, size, left=left, height=0.62, color=used[dtype], alpha=0.75)
                left += size
            axes.plot([left, left], [row - 0.31, row + 0.31], color="white", linewidth=2)
            if (left - start) / most > 0.09:
                word = what.removeprefix("optimizer ").removesuffix("s of weights")
                axes.text((start + left) / 2, row, word, ha="center", va="center", fontsize=8)
        axes.text(left + most * 0.01, row, size_label(totals[name]), va="center", fontsize=9)
    axes.set_yticks(range(len(tables)), list(tables))
    axes.set_xticks([])
    axes.set_xlim(0, most * 1.13)
    axes.set_ylim(len(tables) - 0.5, -0.5)
    axes.grid(visible=False)
    handles = [
        axes.barh(0, 0, color=colour, alpha=0.75, label=name) for name, colour in used.items()
    ]
    axes.legend(
        handles=handles, frameon=False, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.02)
    )
    axes.set_title("Kept in memory, by type (measured from the tensors)")
    order = "parts, from the left: " + ", ".join(wanted).replace(
        "narrow copies of weights", "copies"
    )
    figure.supxlabel(order, fontsize=9, color=QUIET)
    return figure


@styled
def sum_errors(
    errors: Mapping[str, Mapping[int, float]],
    *,
    predicted: Mapping[str, Mapping[int, float]] | None = None,
) -> LabFigure:
    """Relative error of a sum over n ranks against n, by type; predicted ones are lines."""
    if not errors or not all(errors.values()):
        raise ValueError("errors is empty; {'bf16': {2: 2e-3, 4: 3e-3}} works")
    figure, axes = new_figure(
        height_in=3.2,
        alt="; ".join(
            f"{name}: {by_n[max(by_n)]:.2g} at {max(by_n)}" for name, by_n in errors.items()
        ),
    )
    ends = {}
    for name, by_n in errors.items():
        colour = _COLOUR.get(name, COLOURS[-1])
        line = (predicted or {}).get(name, by_n)
        axes.plot(list(line), list(line.values()), color=colour, linewidth=1.4)
        axes.plot(list(by_n), list(by_n.values()), "o", color=colour)
        ends[name] = (float(max(by_n)), by_n[max(by_n)], colour)
    axes.set_xscale("log", base=2)
    ns = sorted({n for by_n in errors.values() for n in by_n})
    axes.set_xticks(ns, [str(n) for n in ns])
    log_y_axis(axes, lambda tick: f"{tick:.0e}")
    axes.set_xlabel("terms (ranks) in the sum")
    axes.set_ylabel("relative error")
    axes.set_title("Error of a summed gradient" + (" (line: predicted)" if predicted else ""))
    label_line_ends(axes, ends)
    return figure


@styled
def rates_by_type(
    rates: Mapping[str, Mapping[str, float]], *, best_measured: Mapping[str, float] | None = None
) -> LabFigure:
    """Matrix rates of each GPU by type (flop/s, datasheet); a line: the best bf16 rate measured."""
    if not rates:
        raise ValueError("rates is empty; {'H100': {'bf16': 989e12}} works")
    types = list(dict.fromkeys(kind for by_type in rates.values() for kind in by_type))
    figure, axes = new_figure(
        height_in=3.0,
        alt="; ".join(
            f"{gpu}: " + ", ".join(f"{kind} {rate / 1e12:,.0f}" for kind, rate in by_type.items())
            for gpu, by_type in rates.items()
        ),
    )
    width = 0.8 / len(types)
    for i, kind in enumerate(types):
        places = [g + (i - (len(types) - 1) / 2) * width for g in range(len(rates))]
        values = [by_type.get(kind, 0.0) / 1e12 for by_type in rates.values()]
        bars = axes.bar(places, values, width * 0.92, color=_COLOUR[kind], alpha=0.75, label=kind)
        labels = [f"{value:,.0f}" if value else "none" for value in values]
        axes.bar_label(bars, labels, padding=1, fontsize=8, color=QUIET)
        if kind == "bf16":
            for place, gpu in zip(places, rates, strict=True):
                best = (best_measured or {}).get(gpu)
                if best is not None:
                    ends = [place - width * 0.45, place + width * 0.45]
                    axes.plot(ends, [best / 1e12] * 2, color=INK, linewidth=2)
    axes.set_xticks(range(len(rates)), list(rates))
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Published: dense matrix products (black line: best bf16 measured by others)")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="x", visible=False)
    return figure
