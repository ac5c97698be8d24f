"""What is a curve worth? Something that changes in training, against the tokens read.

by_tokens({"batch of 512": [(512, 6.2), (1024, 6.1)]}, label="loss (nats per token)", title="...")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    new_figure,
    styled,
)

Curve = Sequence[tuple[float, float]]
"""(tokens read, value), in order."""


@styled
def by_tokens(
    curves: Mapping[str, Curve],
    *,
    label: str,
    title: str,
    levels: Mapping[str, float] | None = None,
    logarithmic: bool = False,
) -> LabFigure:
    """Curves over one axis of tokens, so that runs with unequal batches can be compared.

    `levels` are named horizontal lines. Raises ValueError for a curve without points.
    """
    if not curves or not all(curves.values()):
        raise ValueError("each curve needs a point; {'batch of 512': [(512, 6.2)]} works")
    ends = {name: curve[-1] for name, curve in curves.items()}
    figure, axes = new_figure(
        height_in=3.6,
        alt=f"{title}: " + ", ".join(f"{name} ends at {y:.3g}" for name, (_, y) in ends.items()),
    )
    for i, curve in enumerate(curves.values()):
        axes.plot(*zip(*curve, strict=True), color=COLOURS[i % len(COLOURS)])
    if logarithmic:
        axes.set_yscale("log")
    labels = {name: (*ends[name], COLOURS[i % len(COLOURS)]) for i, name in enumerate(curves)}
    right = max(x for x, _ in ends.values())
    for name, level in (levels or {}).items():
        axes.axhline(level, color=INK, linewidth=1, linestyle=":")
        labels[name] = (right, level, QUIET)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("tokens read")
    axes.set_ylabel(label)
    axes.set_title(title)
    label_line_ends(axes, labels, gap_pt=13)
    return figure
