"""Choose a link, a collective, ranks and a size: how long does it take, and which term decides?

link_explorer()
link_explorer(measured={"this machine": fit_latency_bandwidth(table.rows, world_size=2)})
"""

from __future__ import annotations

from collections.abc import Mapping

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.plan.communication import COLLECTIVES, LinkFit
from labsupport.plan.links import Road, road_of_fit, roads
from labsupport.plots import LabFigure
from labsupport.plots.links import SIZES
from labsupport.plots.style import size_label
from labsupport.widgets.live_picture import LivePicture

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def link_explorer(
    *,
    link: str = "nvlink4",
    collective: str = "all_reduce",
    world_size: int = 8,
    size_bytes: int = 2**26,
    measured: Mapping[str, LinkFit] | None = None,
) -> LivePicture:
    """Menus and sliders over `plots.link_time`; `measured` adds links that were fitted here.

    `link` is a key of `plan.links.roads()` or of `measured`, `size_bytes` a power of two from
    1 KiB to 16 GiB. Raises ValueError with the choices for anything else.
    """
    choices: dict[str, Road] = dict(roads())
    choices |= {name: road_of_fit(name, fit) for name, fit in (measured or {}).items()}
    _check("link", link, list(choices))
    _check("collective", collective, list(COLLECTIVES))
    _check("world_size", world_size, list(RANKS))
    _check("size_bytes", size_bytes, [int(size) for size in SIZES])
    controls = {
        "link": Dropdown(
            options=[(road.name, key) for key, road in choices.items()],
            value=link,
            description="link",
        ),
        "collective": Dropdown(
            options=list(COLLECTIVES), value=collective, description="collective"
        ),
        "world_size": SelectionSlider(options=RANKS, value=world_size, description="ranks"),
        "size_bytes": SelectionSlider(
            options=[(size_label(size), int(size)) for size in SIZES],
            value=size_bytes,
            description="size",
        ),
    }

    def draw(link: str, collective: str, world_size: int, size_bytes: int) -> LabFigure:
        return plots.link_time(
            choices[link],
            COLLECTIVES[collective],
            name=collective,
            world_size=world_size,
            size_bytes=size_bytes,
        )

    return LivePicture(draw=draw, controls=controls)


def _check(name: str, value: object, known: list[str] | list[int]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not offered; one of {', '.join(map(str, known))}")
