"""One global batch on 1, 2, 4 or 8 ranks: what each reads, and what all of them then hold.

batch_split(world_size=2, global_batch_size=16)
"""

from __future__ import annotations

from ipywidgets import SelectionSlider

from labsupport import plots
from labsupport.widgets.live_picture import LivePicture

RANKS = (1, 2, 4, 8)
BATCHES = (8, 16, 32, 64)


def batch_split(*, world_size: int = 2, global_batch_size: int = 16) -> LivePicture:
    """Sliders for the ranks and the sequences of the batch over `plots.data_parallel_step`.

    Raises ValueError for a value that the sliders do not offer.
    """
    for name, value, offered in (
        ("world_size", world_size, RANKS),
        ("global_batch_size", global_batch_size, BATCHES),
    ):
        if value not in offered:
            raise ValueError(f"{name}={value!r} is not offered; one of {offered}")
    controls = {
        "world_size": SelectionSlider(options=RANKS, value=world_size, description="ranks"),
        "global_batch_size": SelectionSlider(
            options=BATCHES, value=global_batch_size, description="sequences"
        ),
    }
    return LivePicture(draw=plots.data_parallel_step, controls=controls)
