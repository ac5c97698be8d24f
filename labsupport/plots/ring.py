"""One moment of a ring all-reduce: who holds which sums, and which chunk goes where next.

    ring_step(world_size=4, step=1)

Rows are ranks, columns are chunks. A box is striped by the ranks whose numbers are summed in it;
A…D is the sum from A to D in the order of the ring.
Each arrow is a message of S/n bytes to the next rank; the last rank's goes round to rank 0.
"""

from __future__ import annotations

from typing import Any

from labsupport.plan.ring import RingState, ring_all_reduce_state
from labsupport.plots.pictures import Box, check_ranks, draw_box, letter
from labsupport.plots.style import COLOURS, INK, QUIET, LabFigure, blank, new_figure, styled

ROW = 1.45
"""Height of a rank's row in boxes; the arrows live between the rows."""
LEFT, BELOW, ABOVE = 2.1, 2.1, 2.1
"""Room around the boxes for the ranks' names, the words and the chunks' names."""


@styled
def ring_step(*, world_size: int = 4, step: int = 0) -> LabFigure:
    """The state after `step` of 2(n - 1) steps, with the messages of the coming step as arrows."""
    check_ranks(world_size)
    state = ring_all_reduce_state(world_size=world_size, steps_done=step)
    heading, below = _words(state)
    units_wide = LEFT + 11.7
    units_high = BELOW + (world_size - 1) * ROW + ABOVE
    figure, axes = new_figure(
        height_in=0.4 + units_high * 7.4 / units_wide, alt=f"{heading}. {below}"
    )
    blank(axes)
    for rank in range(world_size):
        y = _y(state, rank)
        axes.text(
            -0.4, y + 0.5, f"rank {rank}", ha="right", va="center", color=COLOURS[rank], fontsize=10
        )
        for chunk in range(world_size):
            draw_box(axes, _box(state, rank, chunk), x=_x(state, chunk), y=y)
    for chunk in range(world_size):
        axes.text(
            _x(state, chunk) + 0.5,
            _y(state, 0) + 1.62,
            f"chunk {chunk}",
            ha="center",
            va="bottom",
            color=QUIET,
            fontsize=9,
        )
    for rank, chunk in enumerate(state.sends):
        _arrow(axes, state, rank, chunk)
    axes.set_title(heading)
    axes.text(-LEFT + 0.1, -0.95, below, va="top", linespacing=1.4)
    axes.set_xlim(-LEFT, units_wide - LEFT)
    axes.set_ylim(-BELOW, _y(state, 0) + ABOVE)
    return figure


def _words(state: RingState) -> tuple[str, str]:
    """The heading, and the two lines under the picture."""
    n = state.world_size
    heading = f"Ring all-reduce of {n} ranks: {state.steps_done} of {state.num_steps} steps done"
    sent = (
        f"Sent so far by each rank: {state.steps_done} chunks of S/{n} = {state.sent_share:.2f} S"
    )
    if not state.sends:
        return heading, f"Done: every rank holds every sum.\n{sent}, whatever S is."
    phase, does = ("reduce-scatter", "adds") if state.is_summing else ("all-gather", "keeps")
    what = f"Next ({phase}): each rank sends one chunk to the next rank, which {does} it."
    return heading, f"{what}\n{sent}."


def _x(state: RingState, chunk: int) -> float:
    """Left edge of a chunk's boxes."""
    return chunk * min(2.4, 10.4 / (state.world_size - 1))


def _y(state: RingState, rank: int) -> float:
    """Lower edge of a rank's boxes; rank 0 is at the top."""
    return (state.world_size - 1 - rank) * ROW


def _box(state: RingState, rank: int, chunk: int) -> Box:
    ranks = state.holds[rank][chunk]
    if len(ranks) == state.world_size:
        return Box(ranks=ranks, name="Σ")
    # A chunk starts at the rank of its number and gathers the ranks that follow in the ring.
    first, last = letter(chunk), letter((chunk + len(ranks) - 1) % state.world_size)
    return Box(
        ranks=ranks,
        name={1: letter(min(ranks)), 2: f"{first}+{last}"}.get(len(ranks), f"{first}…{last}"),
    )


def _arrow(axes: Any, state: RingState, rank: int, chunk: int) -> None:
    """From the sender's box down to the next rank's; the last rank's leaves below, enters above."""
    x = _x(state, chunk) + 0.5
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    y = _y(state, rank)
    if rank < state.world_size - 1:
        axes.annotate(
            "", xy=(x, _y(state, rank + 1) + 1.02), xytext=(x, y - 0.02), arrowprops=style
        )
        return
    axes.plot([x, x], [y - 0.02, y - 0.5], color=INK, linewidth=1.6)
    axes.text(x + 0.15, y - 0.48, "to rank 0", fontsize=8.5, color=QUIET, va="center")
    top = _y(state, 0) + 1.0
    axes.annotate("", xy=(x, top + 0.02), xytext=(x, top + 0.52), arrowprops=style)
