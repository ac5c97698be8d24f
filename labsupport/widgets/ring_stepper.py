"""Ring all-reduce, a step at a time: who holds which sums, and what goes where next.

ring_stepper(world_size=4)
"""

from __future__ import annotations

from typing import Any

from ipywidgets import IntSlider

from labsupport import plots
from labsupport.plots import LabFigure
from labsupport.widgets.live_picture import LivePicture


def ring_stepper(*, world_size: int = 4, step: int = 0) -> LivePicture:
    """Sliders for the ranks (2 to 8) and the steps done (0 to 2(n - 1)) over `plots.ring_step`.

    Raises ValueError for a number of ranks or a step that does not exist.
    """
    plots.ring_step(world_size=world_size, step=step)  # refuses what cannot be drawn
    ranks = IntSlider(value=world_size, min=2, max=8, description="ranks", continuous_update=False)
    steps = IntSlider(value=step, min=0, max=2 * (world_size - 1), description="steps done")

    def fit_steps(change: dict[str, Any]) -> None:
        steps.max = 2 * (change["new"] - 1)  # a larger step is moved to the last

    def draw(world_size: int, step: int) -> LabFigure:
        return plots.ring_step(world_size=world_size, step=min(step, 2 * (world_size - 1)))

    ranks.observe(fit_steps, names="value")
    return LivePicture(draw=draw, controls={"world_size": ranks, "step": steps})
