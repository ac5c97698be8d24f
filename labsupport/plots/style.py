"""One look for every picture: width of a notebook, colours that the colour-blind can tell apart.

    figure, axes = new_figure(height_in=3.2)
    axes.plot(...)
    label_line_ends(axes, {"1 process": (x, y, COLOURS[0])})

Figures are made without pyplot, which keeps a list of open figures and may show one twice. A
notebook shows the figure that a cell ends with, as PNG with a text for screen readers (`alt`).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

WIDTH_IN = 7.6
DPI = 110

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
"""Okabe and Ito's palette and two more; rank r has COLOURS[r]."""
INK = "#222222"
QUIET = "#767676"
FAINT = "#E6E6E6"

TEXT_PT = 9.5
RC = {
    "font.size": TEXT_PT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "text.color": INK,
    "text.parse_math": False,
}


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def styled(draw: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: inside `draw` matplotlib uses this file's settings, outside the user's own."""

    @functools.wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with rc_context(RC):
            return draw(*args, **kwargs)

    return drawn


class LabFigure(Figure):
    """A matplotlib Figure that a notebook shows by itself, without pyplot."""

    alt: str = ""
    """What the picture says, in a sentence."""

    @styled
    def to_png(self) -> bytes:
        """The picture as it appears in a notebook."""
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
        return stream.getvalue()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        width, height = (round(inches * DPI) for inches in self.get_size_inches())
        data = {"image/png": self.to_png(), "text/plain": f"<picture {width}x{height}>"}
        return data, {"image/png": {"alt": self.alt, "width": width, "height": height}}


def new_figure(
    *,
    height_in: float = 3.4,
    rows: int = 1,
    columns: int = 1,
    alt: str = "",
    height_ratios: Sequence[float] | None = None,
    width_ratios: Sequence[float] | None = None,
    share_x: bool = False,
) -> tuple[LabFigure, Any]:
    """A figure of notebook width and its axes (one Axes, or an array where there are several)."""
    figure = LabFigure(
        figsize=(WIDTH_IN, height_in),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06),
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        rows, columns, sharex=share_x, height_ratios=height_ratios, width_ratios=width_ratios
    )
    figure.alt = alt
    return figure, axes


def blank(axes: Any) -> None:
    """No axes, no grid: a canvas for boxes and arrows, one unit as wide as it is high."""
    axes.set_axis_off()
    axes.set_aspect("equal")


def label_line_ends(
    axes: Any, ends: Mapping[str, tuple[float, float, str]], *, gap_pt: float = 12.0
) -> None:
    """Write each name right of its line's last point (x, y, colour), moved apart vertically.

    Call it last: it needs the axes' final limits.
    """
    axes.figure.canvas.draw()
    pixels_per_pt = axes.figure.dpi / 72
    order = sorted(ends, key=lambda name: ends[name][1])
    wished = [axes.transData.transform(ends[name][:2])[1] for name in order]
    gap = gap_pt * pixels_per_pt
    placed = _apart(wished, gap, floor=axes.bbox.y0 + gap / 2)
    for name, wish, place in zip(order, wished, placed, strict=True):
        x, y, colour = ends[name]
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(6, (place - wish) / pixels_per_pt),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _apart(wished: Sequence[float], gap: float, *, floor: float) -> list[float]:
    """Heights in the same order, at least `gap` apart and above `floor`, near what they wished."""
    placed: list[float] = []
    for wish in wished:
        placed.append(wish if not placed else max(wish, placed[-1] + gap))
    shift = sum(p - w for p, w in zip(placed, wished, strict=True)) / max(1, len(placed))
    shift = min(shift, placed[0] - floor) if placed else 0.0
    return [p - shift for p in placed]


def size_label(size_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            digits = ".3g" if size_bytes < 999.5 * factor else ",.0f"  # 1,020 KiB, not 1.02e+03
            return f"{size_bytes / factor:{digits}} {unit}"
    return f"{size_bytes:.3g} B"


def time_label(time_s: float) -> str:
    """0.00042 -> "420 µs"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if time_s * factor >= 0.9995:
            return f"{time_s * factor:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns"


def size_axis(axes: Any, sizes_bytes: Sequence[float]) -> None:
    """A logarithmic x axis of message sizes with a tick every sixteen-fold: 1 KiB, 16 KiB, ..."""
    low, high = min(sizes_bytes), max(sizes_bytes)
    ticks = [2**p for p in range(2, 50, 4) if low * 0.99 <= 2**p <= high * 1.01]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_label(tick) for tick in ticks], fontsize=9)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("message size")


def log_y_axis(axes: Any, label: Callable[[float], str]) -> None:
    """A logarithmic y axis with a tick every power of ten, written by `label`."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [10.0**power for power in range(-12, 13) if low <= 10.0**power <= high]
    axes.set_yticks(ticks, [label(tick) for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
