"""A picture for each collective: what every rank holds before, and what it holds after.

    all_reduce(world_size=4)       # rows are ranks, boxes are pieces of a tensor
    collectives_table()            # all eight on one page

Colour says whose numbers a box holds. A box of several colours is the sum of those ranks' numbers.
A and B are the tensors of rank 0 and 1, A2 is piece 2 of A, Σ2 the sum of everybody's piece 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import Rectangle

from labsupport.plots.style import COLOURS, INK, QUIET, LabFigure, blank, new_figure, styled

MOST_RANKS = len(COLOURS)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A piece of a tensor on a rank: whose numbers are in it, and its name."""

    ranks: frozenset[int]
    name: str


Holdings = Sequence[Sequence[Box | None]]
"""holdings[rank][slot]; None is an empty slot."""


@dataclass(frozen=True, kw_only=True)
class CollectivePicture:
    """One collective in words and boxes."""

    name: str
    says: str
    sends: str
    before: Holdings
    after: Holdings


def broadcast(*, world_size: int = 4) -> LabFigure:
    """Rank 0's tensor on every rank."""
    return _draw_one(_broadcast(world_size))


def scatter(*, world_size: int = 4) -> LabFigure:
    """Rank 0's pieces, one to each rank."""
    return _draw_one(_scatter(world_size))


def gather(*, world_size: int = 4) -> LabFigure:
    """Everybody's piece on rank 0."""
    return _draw_one(_gather(world_size))


def all_reduce(*, world_size: int = 4) -> LabFigure:
    """The sum of everybody's tensor, on every rank."""
    return _draw_one(_all_reduce(world_size))


def reduce_scatter(*, world_size: int = 4) -> LabFigure:
    """The sum, one piece of it to each rank."""
    return _draw_one(_reduce_scatter(world_size))


def all_gather(*, world_size: int = 4) -> LabFigure:
    """Everybody's piece, on every rank."""
    return _draw_one(_all_gather(world_size))


def all_to_all(*, world_size: int = 4) -> LabFigure:
    """Piece c of rank r becomes piece r of rank c."""
    return _draw_one(_all_to_all(world_size))


def send_recv(*, world_size: int = 4) -> LabFigure:
    """Rank 0's tensor to rank 1; nobody else takes part."""
    return _draw_one(_send_recv(world_size))


@styled
def collectives_table(*, world_size: int = 4) -> LabFigure:
    """All eight on one page."""
    makers: list[Callable[[int], CollectivePicture]] = [
        _broadcast,
        _scatter,
        _gather,
        _all_gather,
        _all_reduce,
        _reduce_scatter,
        _all_to_all,
        _send_recv,
    ]
    figure, axes = new_figure(
        rows=4,
        columns=2,
        height_in=9.2,
        alt=f"What {world_size} ranks hold before and after each of eight collectives",
    )
    for axis, maker in zip(axes.flat, makers, strict=True):
        _draw(axis, maker(world_size))
    return figure


def draw_box(axes: Any, box: Box | None, *, x: float, y: float, size: float = 1.0) -> None:
    """A square with its lower left corner at (x, y), striped by the ranks summed in it."""
    if box is None:
        axes.add_patch(
            Rectangle((x, y), size, size, facecolor="none", edgecolor="#BBBBBB", linestyle=":")
        )
        return
    ranks = sorted(box.ranks)
    stripe = size / len(ranks)
    for i, rank in enumerate(ranks):
        axes.add_patch(
            Rectangle(
                (x + i * stripe, y), stripe, size, facecolor=COLOURS[rank], alpha=0.55, linewidth=0
            )
        )
    axes.add_patch(Rectangle((x, y), size, size, facecolor="none", edgecolor=INK, linewidth=0.9))
    axes.text(x + size / 2, y + size / 2, box.name, ha="center", va="center", fontsize=9)


def letter(rank: int) -> str:
    """A for rank 0, B for rank 1."""
    return chr(ord("A") + rank)


def check_ranks(world_size: int, *, at_least: int = 2) -> None:
    """Pictures have a colour for each of up to eight ranks."""
    if not at_least <= world_size <= MOST_RANKS:
        raise ValueError(
            f"{world_size=} cannot be drawn; between {at_least} and {MOST_RANKS} works, as 4 does"
        )


def _piece(rank: int, chunk: int | None = None) -> Box:
    name = letter(rank) + ("" if chunk is None else str(chunk))
    return Box(ranks=frozenset({rank}), name=name)


def _sum(n: int, chunk: int) -> Box:
    return Box(ranks=frozenset(range(n)), name=f"Σ{chunk}")


def _own(n: int) -> Holdings:
    """Every rank holds a whole tensor of n pieces."""
    return [[_piece(r, c) for c in range(n)] for r in range(n)]


def _own_piece(n: int) -> Holdings:
    """Every rank holds one piece, in its own slot."""
    return [[_piece(r) if c == r else None for c in range(n)] for r in range(n)]


def _only_rank_0(row: Sequence[Box | None], n: int) -> Holdings:
    empty: list[Box | None] = [None] * len(row)
    return [list(row), *[empty] * (n - 1)]


def _broadcast(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="broadcast",
        says="rank 0's tensor, everywhere",
        sends="S over each link",
        before=_only_rank_0([_piece(0)], n),
        after=[[_piece(0)]] * n,
    )


def _scatter(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="scatter",
        says="rank 0's pieces, one for each",
        sends="rank 0 sends (n − 1)/n · S",
        before=_only_rank_0([_piece(0, c) for c in range(n)], n),
        after=[[_piece(0, r) if c == r else None for c in range(n)] for r in range(n)],
    )


def _gather(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="gather",
        says="everybody's piece, on rank 0",
        sends="rank 0 receives (n − 1)/n · S",
        before=_own_piece(n),
        after=_only_rank_0([_piece(r) for r in range(n)], n),
    )


def _all_gather(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="all_gather",
        says="everybody's piece, everywhere",
        sends="each sends (n − 1)/n · S",
        before=_own_piece(n),
        after=[[_piece(r) for r in range(n)]] * n,
    )


def _all_reduce(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="all_reduce",
        says="the sum, everywhere",
        sends="each sends 2(n − 1)/n · S",
        before=_own(n),
        after=[[_sum(n, c) for c in range(n)]] * n,
    )


def _reduce_scatter(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="reduce_scatter",
        says="the sum, a piece for each",
        sends="each sends (n − 1)/n · S",
        before=_own(n),
        after=[[_sum(n, r) if c == r else None for c in range(n)] for r in range(n)],
    )


def _all_to_all(n: int) -> CollectivePicture:
    return CollectivePicture(
        name="all_to_all",
        says="rows become columns",
        sends="each sends (n − 1)/n · S",
        before=_own(n),
        after=[[_piece(c, r) for c in range(n)] for r in range(n)],
    )


def _send_recv(n: int) -> CollectivePicture:
    empty: list[Box | None] = [None]
    return CollectivePicture(
        name="send / recv",
        says="from rank 0 to rank 1 alone",
        sends="rank 0 sends S",
        before=_only_rank_0([_piece(0)], n),
        after=[[_piece(0)], [_piece(0)], *[empty] * (n - 2)],
    )


@styled
def _draw_one(picture: CollectivePicture) -> LabFigure:
    n = len(picture.before)
    figure, axes = new_figure(
        height_in=1.0 + 0.42 * n,
        alt=f"{picture.name} of {n} ranks, before and after: {picture.says}",
    )
    _draw(axes, picture)
    return figure


def _draw(axes: Any, picture: CollectivePicture) -> None:
    n = len(picture.before)
    check_ranks(n)
    slots = len(picture.before[0])
    blank(axes)
    after_x = n + 1.6  # the same place whatever the number of slots, so that pictures line up
    for x, heading, holdings in (
        (0.0, "before", picture.before),
        (after_x, "after", picture.after),
    ):
        start = x + (n - slots) / 2
        axes.text(start, n + 0.25, heading, va="bottom", color=QUIET)
        for rank, row in enumerate(holdings):
            for slot, box in enumerate(row):
                draw_box(axes, box, x=start + slot, y=n - 1 - rank + 0.08, size=0.84)
    for rank in range(n):
        axes.text(
            -0.35, n - 0.5 - rank, f"rank {rank}", ha="right", va="center", color=COLOURS[rank]
        )
    axes.annotate(
        "",
        xy=(n + 1.35, n / 2),
        xytext=(n + 0.15, n / 2),
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6},
    )
    axes.text((n - slots) / 2, -0.25, picture.sends, va="top", color=QUIET, fontsize=9)
    axes.set_title(f"{picture.name}: {picture.says}", fontsize=10)
    axes.set_xlim(-2.6, after_x + n + 0.1)
    axes.set_ylim(-1.0, n + 0.9)
