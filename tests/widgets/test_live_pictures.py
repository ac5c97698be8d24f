from __future__ import annotations

import re

import nbformat
import pytest
from ipywidgets import IntSlider
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from labsupport import plots
from labsupport.plan.communication import LinkFit, ring_all_reduce
from labsupport.widgets import LivePicture, link_explorer, live_picture, ring_stepper


def test_the_stepper_draws_what_its_sliders_say() -> None:
    stepper = ring_stepper(world_size=4)
    assert stepper.figure.to_png() == plots.ring_step(world_size=4, step=0).to_png()
    stepper.controls["step"].value = 6
    assert stepper.figure.to_png() == plots.ring_step(world_size=4, step=6).to_png()
    stepper.controls["world_size"].value = 3  # has four steps only
    assert stepper.values == {"world_size": 3, "step": 4}
    assert stepper.figure.alt.startswith("Ring all-reduce of 3 ranks: 4 of 4 steps done")
    stepper.controls["world_size"].value = 8
    assert stepper.controls["step"].max == 14


def test_the_explorer_names_the_term_that_dominates() -> None:
    explorer = link_explorer(link="pcie5-x16", size_bytes=2**10, world_size=64)
    assert "latency decides" in explorer.figure.alt
    explorer.controls["size_bytes"].value = 2**30
    assert "bandwidth decides" in explorer.figure.alt
    explorer.controls["collective"].value = "broadcast"
    explorer.controls["link"].value = "infiniband-ndr"
    assert explorer.figure.alt.startswith("broadcast of 64 ranks over InfiniBand NDR: 1 GiB")


def test_a_fitted_link_joins_the_menu() -> None:
    fit = LinkFit(
        collective=ring_all_reduce,
        world_size=2,
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        median_relative_error=0.1,
        worst_relative_error=0.2,
        num_points=17,
    )
    explorer = link_explorer(link="here", measured={"here": fit}, world_size=2, size_bytes=2**10)
    assert explorer.figure.alt == "all_reduce of 2 ranks over here: 1 KiB: 201 µs, latency decides"


def test_every_choice_can_be_drawn() -> None:
    explorer = link_explorer()
    for control in ("link", "collective"):
        for option in explorer.controls[control].options:
            explorer.controls[control].value = option[1] if control == "link" else option


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ring_stepper(world_size=9), "between 2 and 8 works"),
        (lambda: ring_stepper(world_size=4, step=9), "6 works"),
        (lambda: link_explorer(link="string"), "nvlink4"),
        (lambda: link_explorer(size_bytes=1000), "1024, 2048"),
        (lambda: link_explorer(world_size=3), "2, 4, 8"),
        (lambda: link_explorer(collective="gossip"), "all_reduce"),
        (lambda: LivePicture(draw=plots.ring_step, controls={}), "at least one widget"),
    ],
)
def test_bad_choices(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_shown_picture_is_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    replaced: list[str] = []
    monkeypatch.setattr(live_picture, "display", lambda what, **kw: shown.append((what, kw)))
    monkeypatch.setattr(
        live_picture, "update_display", lambda what, *, display_id: replaced.append(display_id)
    )
    slider = IntSlider(min=0, max=4, description="steps done")
    picture = LivePicture(
        draw=lambda step: plots.ring_step(world_size=3, step=step), controls={"step": slider}
    )
    slider.value = 1
    assert replaced == []  # nothing is shown yet
    picture._ipython_display_()
    slider.value = 2
    (controls, raw), (figure, handle) = shown  # type: ignore[misc]
    assert raw == {"raw": True}
    assert controls["text/plain"] == "Run this cell in JupyterLab to move the controls: steps done."
    assert figure.alt.startswith("Ring all-reduce of 3 ranks: 1 of 4")
    assert replaced == [handle["display_id"]]


def executed() -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell("from labsupport.widgets import *\nring_stepper()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    return NotebookClient(notebook, timeout=60, kernel_name="python3").execute()


def test_a_saved_notebook_holds_the_picture_once_and_the_same_words_each_time() -> None:
    first, second = executed(), executed()
    outputs = [notebook.cells[0].outputs for notebook in (first, second)]
    assert [set(output.data) for output in outputs[0]] == [
        {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"},
        {"image/png", "text/plain"},
    ]
    said = [[output.data["text/plain"] for output in each] for each in outputs]
    assert said[0] == said[1]
    assert outputs[0][1].data["image/png"] == outputs[1][1].data["image/png"]
    del first.metadata["widgets"]  # as when the state is not saved
    page, _ = HTMLExporter().from_notebook_node(first)
    assert len(re.findall(r"<img[^>]*data:image/png", page)) == 1
    assert "Run this cell in JupyterLab" in page
