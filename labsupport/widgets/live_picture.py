"""A picture that its controls redraw, and that stays a picture where there is nothing to control.

    LivePicture(draw=lambda step: plots.ring_step(step=step), controls={"step": IntSlider(max=6)})

A cell that ends with it has two outputs:

    1. the controls     live: sliders.   Elsewhere: one line that says how to get them.
    2. the picture      an ordinary PNG, which the controls replace in place (update_display).

So a saved notebook holds the picture of the default state once, as any figure; an export shows it
without scripts, and nbval finds the same text at each run (it skips widget ids and pictures).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from IPython.display import display, update_display
from ipywidgets import HBox, Layout, Widget

from labsupport.plots import LabFigure

WITHOUT_KERNEL = "Run this cell in JupyterLab to move the controls: {names}."


class LivePicture:
    """`controls[name].value` are the arguments of `draw`; a change of any draws again."""

    def __init__(self, *, draw: Callable[..., LabFigure], controls: Mapping[str, Widget]) -> None:
        if not controls:
            raise ValueError("a picture without controls is a figure; give at least one widget")
        self.controls = dict(controls)
        self._draw = draw
        self._display_id = uuid.uuid4().hex
        self._shown = False
        self.figure = self._drawn()
        for control in self.controls.values():
            control.observe(self._redraw, names="value")

    @property
    def values(self) -> dict[str, Any]:
        """The controls' present values."""
        return {name: control.value for name, control in self.controls.items()}

    def _drawn(self) -> LabFigure:
        return self._draw(**self.values)

    def _redraw(self, _: object = None) -> None:
        self.figure = self._drawn()
        if self._shown:
            update_display(self.figure, display_id=self._display_id)

    def _ipython_display_(self) -> None:
        box = HBox(list(self.controls.values()), layout=Layout(flex_flow="row wrap"))
        bundle = box._repr_mimebundle_()
        names = [control.description for control in self.controls.values()]
        line = WITHOUT_KERNEL.format(names=", ".join(names))
        display({**bundle, "text/html": f"<p><em>{line}</em></p>", "text/plain": line}, raw=True)
        display(self.figure, display_id=self._display_id)
        self._shown = True
