"""A collective on a link: how the time grows with the size, and which term decides at one size.

link_time(roads()["nvlink4"], ring_all_reduce, name="all_reduce", world_size=8, size_bytes=2**26)
"""

from __future__ import annotations

from labsupport.plan.communication import Collective, crossover_bytes
from labsupport.plan.links import Road, predict_on
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    log_y_axis,
    new_figure,
    size_axis,
    size_label,
    styled,
    time_label,
)

SIZES = tuple(2.0**power for power in range(10, 35))
"""1 KiB to 16 GiB."""


@styled
def link_time(
    road: Road, collective: Collective, *, name: str, world_size: int, size_bytes: float
) -> LabFigure:
    """Time of `collective` against size on `road`; the chosen size is marked and split."""

    def cost_of(size: float) -> float:
        return predict_on(road, collective(size_bytes=size, world_size=world_size)).total_s

    here = predict_on(road, collective(size_bytes=size_bytes, world_size=world_size))
    cross = crossover_bytes(
        collective,
        world_size=world_size,
        latency_s=road.latency_s,
        bandwidth_bytes_per_s=road.bandwidth_bytes_per_s,
    )
    words = f"{size_label(size_bytes)}: {time_label(here.total_s)}, {here.dominant} decides"
    figure, (upper, lower) = new_figure(
        rows=2,
        height_in=4.3,
        height_ratios=(4, 1),
        alt=f"{name} of {world_size} ranks over {road.name}: {words}",
    )
    upper.plot(SIZES, [cost_of(size) for size in SIZES], color=COLOURS[0])
    upper.plot([size_bytes], [here.total_s], "o", color=INK, markersize=8)
    upper.axvline(cross, color=QUIET, linewidth=1, linestyle=":")
    log_y_axis(upper, time_label)
    size_axis(upper, SIZES)
    upper.set_ylabel("predicted time")
    upper.set_title(f"{name}, {world_size} ranks, {road.name}\n{words}")
    upper.text(
        cross,
        upper.get_ylim()[1],
        f" both cost the same\n at {size_label(cross)}",
        va="top",
        color=QUIET,
    )
    lower.barh([0], [here.latency_s], color=COLOURS[1], alpha=0.75)
    lower.barh([0], [here.transfer_s], left=[here.latency_s], color=COLOURS[2], alpha=0.75)
    lower.set_axis_off()
    lower.set_xlim(0, here.total_s)
    lower.set_ylim(-1.6, 0.6)
    lower.text(0, -0.6, f"latency {time_label(here.latency_s)}", color=COLOURS[1], va="top")
    lower.text(
        here.total_s,
        -0.6,
        f"transfer {time_label(here.transfer_s)}",
        color=COLOURS[2],
        va="top",
        ha="right",
    )
    lower.text(
        here.total_s / 2,
        -1.6,
        f"predicted by latency + bytes / bandwidth: {road.latency_s * 1e6:.3g} µs a step, "
        f"{road.bandwidth_bytes_per_s / 1e9:.3g} GB/s ({road.basis})",
        color=QUIET,
        ha="center",
        va="bottom",
        fontsize=8.5,
    )
    return figure
