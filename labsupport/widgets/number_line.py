"""Choose a type and a value: which number does it become, and how far are the next ones?

number_line(name="bf16", value=0.1)
"""

from __future__ import annotations

from ipywidgets import Dropdown, FloatLogSlider

from labsupport import plots
from labsupport.plan.number_formats import FORMATS
from labsupport.widgets.live_picture import LivePicture

SMALLEST, LARGEST = 1e-9, 1e9


def number_line(*, name: str = "bf16", value: float = 0.1) -> LivePicture:
    """A menu of the formats and a slider of the value over `plots.number_line`.

    Raises ValueError for a format that is not offered, or a value that the slider does not reach.
    """
    if name not in FORMATS or not SMALLEST <= value <= LARGEST:
        raise ValueError(
            f"{name=} must be one of {', '.join(FORMATS)}, and {value=} lie in "
            f"{SMALLEST:g}…{LARGEST:g}; name='bf16', value=0.1 works"
        )
    slider = FloatLogSlider(value=value, base=10, min=-9, max=9, step=0.01, description="value")
    menu = Dropdown(options=list(FORMATS), value=name, description="type")
    return LivePicture(draw=plots.number_line, controls={"name": menu, "value": slider})
