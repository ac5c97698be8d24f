"""One data-parallel step as a picture: who reads what, and what the ranks tell each other.

data_parallel_step(world_size=2, global_batch_size=16)

    sequences of rank r -> gradient of rank r -> all-reduce -> the mean, on every rank
"""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Rectangle

from labsupport.plots.pictures import Box, check_ranks, draw_box, letter
from labsupport.plots.style import COLOURS, INK, QUIET, LabFigure, blank, new_figure, styled

MOST_SEQUENCES = 64
GRADIENT_X, MEAN_X, END_X = 10.4, 13.2, 18.6
STRIP_WIDTH = 8.0


@styled
def data_parallel_step(*, world_size: int = 2, global_batch_size: int = 16) -> LabFigure:
    """A row a rank: its sequences of the global batch, its gradient, the mean that all then hold.

    Raises ValueError for a batch that the ranks cannot share equally, or one too large to draw.
    """
    check_ranks(world_size, at_least=1)
    if not 1 <= global_batch_size <= MOST_SEQUENCES or global_batch_size % world_size:
        raise ValueError(
            f"{global_batch_size=} must be a multiple of {world_size=} of at most "
            f"{MOST_SEQUENCES}, for example {8 * world_size}"
        )
    each = global_batch_size // world_size
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    figure, axes = new_figure(
        height_in=1.05 + 0.42 * world_size,
        alt=f"{global_batch_size} sequences over {ranks}: {each} each, then the mean gradient",
    )
    blank(axes)
    for rank in range(world_size):
        _draw_row(axes, rank, each, world_size)
    top = world_size + 0.25
    for x, words in (
        (0, f"each reads {each} of {global_batch_size}"),
        (GRADIENT_X - 0.6, "gradient"),
    ):
        axes.text(x, top, words, va="bottom", color=QUIET)
    axes.text(MEAN_X - 0.2, top, "mean", va="bottom", color=QUIET)
    axes.text(0, -0.3, "Text stays where it is; only gradients travel.", va="top", color=QUIET)
    axes.set_title(f"A global batch of {global_batch_size} sequences on {ranks}", fontsize=10)
    axes.set_xlim(-2.4, END_X)
    axes.set_ylim(-1.1, world_size + 0.9)
    return figure


def _draw_row(axes: Any, rank: int, each: int, world_size: int) -> None:
    y = world_size - 1 - rank
    axes.text(-0.35, y + 0.5, f"rank {rank}", ha="right", va="center", color=COLOURS[rank])
    pitch = min(1.0, STRIP_WIDTH / each)
    for i in range(each):
        axes.add_patch(
            Rectangle(
                (i * pitch, y + 0.08),
                0.84 * pitch,
                0.84,
                facecolor=COLOURS[rank],
                alpha=0.55,
                edgecolor=INK,
                linewidth=0.7,
            )
        )
    own = Box(ranks=frozenset({rank}), name=f"g{letter(rank)}")
    mean = Box(ranks=frozenset(range(world_size)), name="g")
    draw_box(axes, own, x=GRADIENT_X, y=y + 0.08, size=0.84)
    draw_box(axes, mean, x=MEAN_X, y=y + 0.08, size=0.84)
    _arrow(axes, STRIP_WIDTH + 0.2, GRADIENT_X - 0.2, y + 0.5)
    _arrow(axes, GRADIENT_X + 1.0, MEAN_X - 0.2, y + 0.5)
    _arrow(axes, MEAN_X + 1.0, MEAN_X + 2.0, y + 0.5)
    axes.text(MEAN_X + 2.2, y + 0.5, "same update", va="center", color=INK)


def _arrow(axes: Any, start: float, end: float, y: float) -> None:
    axes.annotate(
        "",
        xy=(end, y),
        xytext=(start, y),
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.3},
    )
