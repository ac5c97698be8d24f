"""Every picture is drawn, not empty, and holds its words: on the canvas, none upon another."""

from __future__ import annotations

import io
from itertools import combinations

import matplotlib.image
import numpy as np
import pytest
from figures import FIGURES, rows
from matplotlib.axes import Axes
from matplotlib.axis import Tick
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from labsupport import plots
from labsupport.plots import LabFigure
from labsupport.plots.style import size_label, time_label


def words(figure: LabFigure) -> dict[str, list[Bbox]]:
    """Where each visible text stands, in pixels; ticks outside their axis are not drawn."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    ticks = {
        id(text)
        for axis in figure.findobj(lambda a: hasattr(a, "get_major_ticks"))
        for tick in axis.get_major_ticks() + axis.get_minor_ticks()
        for text in (tick.label1, tick.label2)
    }
    shown: set[int] = set()
    for axes in figure.axes:
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                drawn: list[Tick] = axis._update_ticks()
                shown |= {id(tick.label1) for tick in drawn}
    found: dict[str, list[Bbox]] = {}
    for text in figure.findobj(Text):
        if not text.get_visible() or not text.get_text().strip():
            continue
        if id(text) in ticks and id(text) not in shown:
            continue
        if isinstance(text.axes, Axes) and not text.axes.axison and _is_axis_text(text):
            continue
        extent = Text.get_window_extent(text, renderer)
        found.setdefault(text.get_text(), []).append(extent)
    return found


def _is_axis_text(text: Text) -> bool:
    axes = text.axes
    return text in (axes.xaxis.label, axes.yaxis.label)


@pytest.mark.parametrize("name", FIGURES)
def test_figure(name: str) -> None:
    figure = FIGURES[name]()
    pixels = matplotlib.image.imread(io.BytesIO(figure.to_png()))
    assert pixels.shape[1] == round(7.6 * 110)
    assert (pixels[:, :, :3].min(axis=2) < 0.9).mean() > 0.005, "nothing is drawn"
    edge = np.concatenate([pixels[[0, -1]].reshape(-1, 4), pixels[:, [0, -1]].reshape(-1, 4)])
    assert edge.min() > 0.9, "something touches the border"
    found = words(figure)
    assert found
    canvas = figure.bbox
    for text, boxes in found.items():
        for box in boxes:
            beyond = max(-box.x0, -box.y0, box.x1 - canvas.x1, box.y1 - canvas.y1)
            assert beyond < 1, f"{text!r} is clipped: {box} of {canvas}"
    placed = [(text, box) for text, boxes in found.items() for box in boxes]
    for (one, a), (other, b) in combinations(placed, 2):
        overlap = Bbox.intersection(a, b)
        covered = 0 if overlap is None else min(overlap.width, 99) * min(overlap.height, 99)
        assert covered < 12, f"{one!r} and {other!r} overlap"
    assert figure.alt


def test_a_figure_shows_itself_once_with_words_for_screen_readers() -> None:
    figure = plots.ring_step(world_size=3, step=1)
    data, metadata = figure._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert data["image/png"].startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"].startswith("Ring all-reduce of 3 ranks: 1 of 4 steps done")
    assert data["text/plain"].startswith("<picture 836x")
    assert FIGURES["fit"]().to_png() == FIGURES["fit"]().to_png()


def test_pyplot_is_not_touched() -> None:
    import matplotlib.pyplot as plt

    FIGURES["loss"]()
    assert plt.get_fignums() == []


def test_the_arrow_of_a_step_stands_in_the_column_of_its_chunk() -> None:
    figure = plots.ring_step(world_size=4, step=0)
    columns = [
        round(annotation.xy[0], 2)
        for annotation in figure.findobj(Annotation)
        if annotation.arrow_patch is not None
    ]
    assert len(columns) == 4
    assert sorted(columns) == sorted(set(columns))  # four ranks, four chunks on the way


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.all_reduce(world_size=9), "between 2 and 8 works"),
        (lambda: plots.ring_step(world_size=4, step=7), "6 works"),
        (lambda: plots.loss_curves({}), "works"),
        (lambda: plots.bandwidth_curves({}), "table.rows"),
        (lambda: plots.algorithm_and_bus_bandwidth({}), "table.rows"),
        (lambda: plots.bytes_per_rank({}, size_bytes=1), "4096 works"),
        (lambda: plots.bytes_by_world_size(()), r"\(2, 4, 8\) works"),
        (lambda: plots.route_bars([]), "compare_routes"),
        (lambda: plots.sharding_stages(world_size=1), "between 2 and 8"),
        (lambda: plots.sharding_ladder({}), "works"),
        (lambda: plots.exchanged_by_stage({}, unit_bytes=1), "not empty"),
        (lambda: plots.weights_over_step({}), "works"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()  # type: ignore[operator]


def test_labels() -> None:
    assert [size_label(s) for s in (100, 1536, 1020 * 2**10, 2**26, 2**34)] == [
        "100 B", "1.5 KiB", "1,020 KiB", "64 MiB", "16 GiB",
    ]  # fmt: skip
    assert [time_label(t) for t in (2.0, 0.0015, 42e-6, 1e-6, 3e-8)] == [
        "2 s", "1.5 ms", "42 µs", "1 µs", "30 ns",
    ]  # fmt: skip


def test_rows_of_one_size_range_are_enough() -> None:
    plots.bandwidth_curves({"here": rows()[:5]}).to_png()
