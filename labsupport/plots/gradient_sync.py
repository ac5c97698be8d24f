"""Buckets on a time line, and which bucket size leaves the least of the communication exposed.

plan = {"backward_s": 0.1, "world_size": 8, "link": roads()["infiniband-ndr"]}
bucket_size(gradients_of(ModelConfig.named("1b")), bucket_bytes=25 * 2**20, **plan)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labsupport.plan.gradient_sync import (
    Gradient,
    GradientSync,
    Link,
    sync_after_backward,
    sync_during_backward,
)
from labsupport.plots.style import (
    COLOURS,
    INK,
    QUIET,
    LabFigure,
    label_line_ends,
    new_figure,
    size_axis,
    size_label,
    styled,
    time_label,
)

SIZES = tuple(2**power for power in range(12, 33))
"""4 KiB to 4 GiB."""


@styled
def bucket_size(
    gradients: Sequence[Gradient],
    *,
    bucket_bytes: int,
    backward_s: float,
    link: Link,
    world_size: int,
) -> LabFigure:
    """Above: the messages of one backward. Below: exposed time against the size of a bucket."""
    step: Any = {"backward_s": backward_s, "link": link, "world_size": world_size}
    here = sync_during_backward(gradients, bucket_bytes=bucket_bytes, **step)
    words = (
        f"{size_label(bucket_bytes)}: {len(here.messages)} "
        f"{'message' if len(here.messages) == 1 else 'messages'}, "
        f"{time_label(here.exposed_s)} exposed of {time_label(here.communication_s)}"
    )
    figure, (upper, lower) = new_figure(
        rows=2, height_in=4.6, height_ratios=(1, 2), alt=f"Buckets of {words}"
    )
    _time_line(upper, here)
    upper.set_title(f"Buckets of {words} (predicted)")
    curves = {
        "after the backward": [
            sync_after_backward(gradients, bucket_bytes=size, **step).exposed_s for size in SIZES
        ],
        "during it": [
            sync_during_backward(gradients, bucket_bytes=size, **step).exposed_s for size in SIZES
        ],
    }
    ends = {}
    for i, (name, values) in enumerate(curves.items()):
        colour = COLOURS[1 - i]
        lower.plot(SIZES, values, color=colour)
        ends[name] = (float(SIZES[-1]), values[-1], colour)
    lower.plot([bucket_bytes], [here.exposed_s], "o", color=INK, markersize=8)
    size_axis(lower, SIZES)
    lower.set_ylim(bottom=0)
    _times(lower.yaxis)
    lower.set_xlabel("bucket size")
    lower.set_ylabel("exposed time")
    label_line_ends(lower, ends)
    return figure


def _time_line(axes: Any, sync: GradientSync) -> None:
    """Backward above, messages below it; what sticks out is exposed."""
    axes.barh([1], [sync.backward_s], height=0.6, color=COLOURS[2], alpha=0.75)
    for i, message in enumerate(sync.messages):
        shade = 0.85 if i % 2 == 0 else 0.5  # neighbours can be told apart
        width = message.end_s - message.start_s
        axes.barh([0], [width], left=[message.start_s], height=0.6, color=COLOURS[0], alpha=shade)
    axes.axvline(sync.backward_s, color=QUIET, linewidth=1, linestyle=":")
    axes.set_yticks([0, 1], ["messages", "backward"])
    axes.set_ylim(-0.6, 1.6)
    axes.set_xlim(left=0)
    _times(axes.xaxis)
    axes.grid(axis="y", visible=False)


def _times(axis: Any) -> None:
    axis.set_major_formatter(lambda tick, _: time_label(tick) if tick > 0 else "0")
