"""How large should a bucket be on my link? The time line and the exposed time, while you move it.

bucket_size(link="infiniband-ndr", bucket_bytes=2**25)
"""

from __future__ import annotations

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.config import ModelConfig
from labsupport.plan.gradient_sync import gradients_of
from labsupport.plan.links import roads
from labsupport.plots import LabFigure
from labsupport.plots.style import size_label, time_label
from labsupport.widgets.live_picture import LivePicture

MODELS = ("tiny", "125m", "1b", "llama-3.1-8b")
RANKS = (2, 4, 8, 16, 64, 256, 1024)
BUCKETS = tuple(2**power for power in range(12, 33))
BACKWARDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def bucket_size(
    *,
    model: str = "1b",
    link: str = "infiniband-ndr",
    world_size: int = 16,
    bucket_bytes: int = 2**25,
    backward_s: float = 0.1,
) -> LivePicture:
    """Menus and sliders over `plots.bucket_size`; gradients in 2 bytes, links as datasheets say.

    Raises ValueError for a value that is not offered.
    """
    roads_ = roads()
    offered = {
        "model": (model, MODELS),
        "link": (link, tuple(roads_)),
        "world_size": (world_size, RANKS),
        "bucket_bytes": (bucket_bytes, BUCKETS),
        "backward_s": (backward_s, BACKWARDS_S),
    }
    for name, (value, choices) in offered.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not offered; one of {choices}")
    controls = {
        "model": Dropdown(options=MODELS, value=model, description="model"),
        "link": Dropdown(
            options=[(road.name, key) for key, road in roads_.items()],
            value=link,
            description="link",
        ),
        "world_size": SelectionSlider(options=RANKS, value=world_size, description="ranks"),
        "bucket_bytes": SelectionSlider(
            options=[(size_label(size), size) for size in BUCKETS],
            value=bucket_bytes,
            description="bucket",
        ),
        "backward_s": SelectionSlider(
            options=[(time_label(time_s), time_s) for time_s in BACKWARDS_S],
            value=backward_s,
            description="backward",
        ),
    }

    def draw(
        model: str, link: str, world_size: int, bucket_bytes: int, backward_s: float
    ) -> LabFigure:
        return plots.bucket_size(
            gradients_of(ModelConfig.named(model), bytes_per_gradient=2),
            bucket_bytes=bucket_bytes,
            backward_s=backward_s,
            link=roads_[link],
            world_size=world_size,
        )

    return LivePicture(draw=draw, controls=controls)
