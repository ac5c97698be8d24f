"""Who owns which part of a layer: matrices in columns and rows, heads, tokens. A colour a rank.

split_matrix(world_size=2)                    # one matrix, two owners: by columns, by rows
split_matrices(world_size=2)                  # two of them: columns then rows, and the reverse
split_heads(num_heads=4, num_kv_heads=2, world_size=4)
sequence_parallel(world_size=2)               # what every rank holds between the layers
causal_shares(world_size=4)                   # of a long sequence: in order, and zig-zag
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Rectangle

from labsupport.plots.pictures import Box, check_ranks, draw_box
from labsupport.plots.style import COLOURS, FAINT, INK, QUIET, LabFigure, blank, new_figure, styled

Station = tuple[str, float, float, tuple[int, int], str]
"""Name, width, height, split, and what is said below."""
TALL, WIDE, NARROW = 2.4, 4.0, 1.6
"""Sides of the rectangles: tokens, the feed-forward network's width, hidden."""
BEHIND = 0.25
"""How far the part of a sum of the next rank looks out behind."""


@styled
def split_matrix(*, world_size: int = 2) -> LabFigure:
    """x · A on several ranks: A by columns gives some features, A by rows parts of all of them."""
    check_ranks(world_size, at_least=1)
    n = world_size
    figure, panels = new_figure(
        columns=2, height_in=1.8, alt=f"A matrix on {n} ranks, split by columns and by rows"
    )
    cuts: dict[str, list[Station]] = {
        "By columns": [
            ("x", NARROW, TALL, (1, 1), "on all ranks"),
            ("A", WIDE, NARROW, (1, n), "columns"),
            ("x·A", WIDE, TALL, (1, n), "some features each"),
        ],
        "By rows": [
            ("x", NARROW, TALL, (1, n), "columns"),
            ("A", WIDE, NARROW, (n, 1), "rows"),
            ("parts", WIDE, TALL, (1, -n), "of a sum"),
        ],
    }
    for axes, (title, chain) in zip(panels, cuts.items(), strict=True):
        _chain(axes, chain, ("·", "="), width=13.5)
        axes.set_title(title, fontsize=9.5)
    return figure


@styled
def split_matrices(*, world_size: int = 2) -> LabFigure:
    """x · A · B on several ranks: A by columns and B by rows, and below the other way round."""
    check_ranks(world_size, at_least=1)
    n = world_size
    figure, panels = new_figure(
        rows=2, height_in=3.7, alt=f"A layer of two matrices on {n} ranks, split in two ways"
    )
    whole, columns, rows, parts = (1, 1), (1, n), (n, 1), (1, -n)
    first: list[Station] = [
        ("x", NARROW, TALL, whole, "on all ranks"),
        ("A", WIDE, NARROW, columns, "columns"),
        ("x·A", WIDE, TALL, columns, "split by width"),
        ("B", NARROW, WIDE, rows, "rows"),
        ("parts", NARROW, TALL, parts, "of a sum"),
        ("y", NARROW, TALL, whole, "on all ranks"),
    ]
    second = [
        ("x", NARROW, TALL, columns, "columns"),
        ("A", WIDE, NARROW, rows, "rows"),
        ("parts", WIDE, TALL, parts, "of a sum"),
        ("x·A", WIDE, TALL, whole, "on all ranks"),
        ("B", NARROW, WIDE, columns, "columns"),
        ("y", NARROW, TALL, columns, "columns"),
        ("y", NARROW, TALL, whole, "on all ranks"),
    ]
    _chain(panels[0], first, ("·", "=", "·", "=", "all-reduce"), width=30.3)
    panels[0].set_title("Columns, then rows: one collective, as small as y", fontsize=9.5)
    _chain(panels[1], second, ("·", "=", "all-reduce", "·", "=", "all-gather"), width=30.3)
    panels[1].set_title("Rows, then columns: two, and the first as wide as x·A", fontsize=9.5)
    return figure


@styled
def split_heads(*, num_heads: int, num_kv_heads: int, world_size: int) -> LabFigure:
    """Query heads above the key and value heads that they read; a striped one is on several ranks.

    Raises ValueError for heads that cannot be shared out, and for more than 16.
    """
    check_ranks(world_size, at_least=1)
    n = world_size
    if not 1 <= num_heads <= 16 or num_heads % n or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads=} must be a multiple of {world_size=} and of {num_kv_heads=}, at most 16, "
            "for example 4, 4 and 2"
        )
    figure, axes = new_figure(
        height_in=1.9, alt=f"{num_heads} query and {num_kv_heads} key heads on {n} ranks"
    )
    blank(axes)
    group = num_heads // num_kv_heads
    owner = [head * n // num_heads for head in range(num_heads)]
    for head, rank in enumerate(owner):
        draw_box(axes, Box(ranks=frozenset({rank}), name=f"q{head}"), x=1.3 * head, y=2.2)
    for head in range(num_kv_heads):
        ranks = frozenset(owner[head * group : (head + 1) * group])
        x = 1.3 * (head + 0.5) * group - 0.65
        draw_box(axes, Box(ranks=ranks, name=f"kv{head}"), x=x, y=0)
        for query in range(head * group, (head + 1) * group):
            axes.plot([1.3 * query + 0.5, x + 0.5], [2.15, 1.05], color=QUIET, linewidth=1)
    for rank in range(n):
        axes.text(
            1.3 * (owner.index(rank) + num_heads / n / 2) - 0.15,
            3.4,
            f"rank {rank}",
            ha="center",
            va="bottom",
            color=COLOURS[rank],
        )
    axes.text(-0.4, 2.7, "query heads", ha="right", va="center", color=QUIET)
    axes.text(-0.4, 0.5, "key, value heads", ha="right", va="center", color=QUIET)
    axes.set_xlim(-5, 1.3 * num_heads + 1)
    axes.set_ylim(-0.2, 4.2)
    return figure


@styled
def sequence_parallel(*, world_size: int = 2) -> LabFigure:
    """The stream of a block, station by station: tokens down, width across."""
    check_ranks(world_size, at_least=1)
    n = world_size
    figure, panels = new_figure(
        rows=2,
        height_in=3.3,
        alt=f"What {n} ranks hold in a block, without and with a split stream",
    )
    whole, columns, rows, parts = (1, 1), (1, n), (n, 1), (1, -n)
    heads: Station = ("heads", WIDE * 0.8, TALL, columns, "split by heads")
    summed: Station = ("parts", NARROW, TALL, parts, "of a sum")
    for axes, split, says in zip(
        panels, (whole, rows), ("on all ranks", "split by tokens"), strict=True
    ):
        ends: list[Station] = [(name, NARROW, TALL, split, says) for name in ("norm", "+ stream")]
        if split is whole:
            chain, words = [ends[0], heads, summed, ends[1]], ["→", "→", "all-reduce"]
        else:
            gathered: Station = ("norm", NARROW, TALL, whole, "on all ranks")
            chain = [ends[0], gathered, heads, summed, ends[1]]
            words = ["all-gather", "→", "→", "reduce-scatter"]
        _chain(axes, chain, words, width=22.5)
    panels[0].set_title("Tensor parallel", fontsize=9.5)
    panels[1].set_title("Tensor parallel with sequence parallel", fontsize=9.5)
    return figure


@styled
def causal_shares(*, world_size: int = 4) -> LabFigure:
    """Which rank computes which rows of a causal attention: chunks in order, and in zig-zag."""
    check_ranks(world_size, at_least=1)
    n = world_size
    orders = {
        "In order": [chunk // 2 for chunk in range(2 * n)],
        "Zig-zag": [min(chunk, 2 * n - 1 - chunk) for chunk in range(2 * n)],
    }
    figure, panels = new_figure(
        columns=2, height_in=3.3, alt=f"Shares of a causal attention on {n} ranks"
    )
    for axes, (name, owner) in zip(panels, orders.items(), strict=True):
        blank(axes)
        work = [0.0] * n
        for query in range(2 * n):
            for key in range(query + 1):
                work[owner[query]] += 0.5 if key == query else 1.0
                axes.add_patch(
                    Rectangle(
                        (key, 2 * n - 1 - query),
                        1,
                        1,
                        facecolor=COLOURS[owner[query]],
                        alpha=0.35 if key == query else 0.75,
                        edgecolor="white",
                    )
                )
            axes.text(
                -0.25,
                2 * n - 0.5 - query,
                f"rank {owner[query]}",
                ha="right",
                va="center",
                fontsize=8.5,
                color=COLOURS[owner[query]],
            )
        axes.set_xlim(-2.6, 2 * n)
        axes.set_ylim(-0.9, 2 * n + 0.1)
        axes.text(n, -0.25, "keys →", ha="center", va="top", color=QUIET, fontsize=8.5)
        share = max(work) / sum(work)
        axes.set_title(f"{name}: the busiest rank does {share:.0%}", fontsize=9.5)
    return figure


def _chain(
    axes: Any,
    boxes: Sequence[Station],
    between: Sequence[str],
    *,
    width: float,
) -> None:
    """Rectangles on a line with words between: (name, width, height, split, what it says)."""
    blank(axes)
    x, words = 0.0, ["", *between]
    for (name, across, height, split, says), word in zip(boxes, words, strict=True):
        gap = 0.9 if len(word) <= 1 else 1.2 + 0.24 * len(word)
        if word:
            axes.text(x + gap / 2, 0.15, word, ha="center", va="bottom", fontsize=9)
            if gap > 1:
                axes.annotate(
                    "",
                    xy=(x + gap - 0.15, 0),
                    xytext=(x + 0.15, 0),
                    arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2},
                )
            x += gap
        _split_rectangle(axes, x, across, height, split)
        behind = BEHIND * max(0, -split[1] - 1)
        axes.text(x + across / 2, height / 2 + 0.15 + behind, name, ha="center", va="bottom")
        axes.text(
            x + across / 2, -height / 2 - 0.15, says, ha="center", va="top", color=QUIET, fontsize=8
        )
        x += across + behind
    axes.set_xlim(-0.6, width)
    half = max(height for _, _, height, _, _ in boxes) / 2
    axes.set_ylim(-half - 1.0, half + 1.0)


def _split_rectangle(
    axes: Any, x: float, width: float, height: float, split: tuple[int, int]
) -> None:
    """Grey: whole on all ranks. Strips: each rank's part. Hatched strips: parts of a sum."""
    rows, columns = split
    if split == (1, 1):
        axes.add_patch(
            Rectangle(
                (x, -height / 2), width, height, facecolor=FAINT, edgecolor=INK, linewidth=0.8
            )
        )
        return
    is_sum = columns < 0
    n = max(rows, abs(columns))
    for rank in range(n):
        if is_sum:  # as large as the whole, one behind the other
            shift = BEHIND * (n - 1 - rank)
            corner, w, h = (x + shift, -height / 2 + shift), width, height
        elif rows > 1:
            corner, w, h = (x, height / 2 - (rank + 1) * height / n), width, height / n
        else:
            corner, w, h = (x + rank * width / n, -height / 2), width / n, height
        axes.add_patch(
            Rectangle(
                corner,
                w,
                h,
                facecolor=COLOURS[rank],
                alpha=0.95 if is_sum else 0.75,
                edgecolor=INK,
                linewidth=0.8,
                hatch="///" if is_sum else None,
            )
        )
