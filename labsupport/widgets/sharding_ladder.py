"""What does each stage of sharding hold on how many ranks, and from how many on does it fit?

sharding_ladder(model="llama-3.1-8b", stage="zero3", world_size=64)
sharding_ladder(measured={"tiny": ladder})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.config import MixedPrecision, ModelConfig
from labsupport.plan.parameter_shapes import ParameterShape, shapes_of
from labsupport.plan.sharding import ShardingPlan, Stage, shard
from labsupport.plots import LabFigure
from labsupport.plots.sharding import Ladder
from labsupport.plots.style import size_label
from labsupport.widgets.live_picture import LivePicture

MODELS = ("tiny", "125m", "1b", "llama-3.1-8b")
SHOWN: tuple[Stage, ...] = ("ddp", "zero1", "zero2", "zero3")
RANKS = tuple(2**power for power in range(11))
OPTIMIZERS = ("adamw", "sgd")
DEVICES_GIB = (16, 24, 40, 80, 141, 192)


def sharding_ladder(
    *,
    model: str = "llama-3.1-8b",
    stage: Stage = "zero3",
    world_size: int = 64,
    precision: MixedPrecision = "bf16",
    optimizer: str = "adamw",
    device_gib: int = 80,
    measured: Mapping[str, Ladder] | None = None,
) -> LivePicture:
    """Menus over the predictions of `plan.sharding`: all stages up to `world_size` ranks as bars.

    The title speaks of `stage`. `measured`, model -> stage -> world size -> category -> bytes, is
    what you counted in fp32 with adamw: it is drawn while these are chosen. States only: what is
    left of the device must take activations and logits. Raises ValueError for what is not offered.
    """
    offered: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "model": (model, MODELS),
        "stage": (stage, SHOWN),
        "world_size": (world_size, RANKS),
        "precision": (precision, get_args(MixedPrecision)),
        "optimizer": (optimizer, OPTIMIZERS),
        "device_gib": (device_gib, DEVICES_GIB),
    }
    for name, (value, choices) in offered.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not offered; one of {choices}")

    def draw(
        model: str, stage: Stage, world_size: int, device_gib: int, **recipe: Any
    ) -> LabFigure:
        shapes = shapes_of(ModelConfig.named(model))
        sizes = [n for n in RANKS if world_size / 16 <= n <= world_size]
        is_measured = recipe == {"precision": "fp32", "optimizer": "adamw"}
        return plots.sharding_ladder(
            {
                name: {n: _plan(shapes, name, n, recipe).fullest.bytes_of for n in sizes}
                for name in SHOWN
            },
            measured=(measured or {}).get(model) if is_measured else None,
            limit_bytes=device_gib * 2**30,
            title=_title(shapes, stage, world_size, device_gib, recipe),
        )

    return LivePicture(draw=draw, controls=_controls(offered))


def _plan(
    shapes: tuple[ParameterShape, ...], stage: Stage, world_size: int, recipe: Mapping[str, Any]
) -> ShardingPlan:
    return shard(shapes, stage=stage, world_size=world_size, **recipe)


def _title(
    shapes: tuple[ParameterShape, ...],
    stage: Stage,
    world_size: int,
    device_gib: int,
    recipe: Mapping[str, Any],
) -> str:
    def states_bytes(num_ranks: int) -> int:
        return _plan(shapes, stage, num_ranks, recipe).fullest.total_bytes

    fitting = (n for n in RANKS if states_bytes(n) <= device_gib * 2**30)
    fewest = next(fitting, None)
    fits = f"fit from {fewest} ranks on" if fewest else f"do not fit on {RANKS[-1]:,} ranks"
    held = size_label(states_bytes(world_size))
    return f"{stage}, {world_size} ranks: {held} each; in {device_gib} GiB the states {fits}"


def _controls(offered: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    names = {"world_size": "ranks", "device_gib": "device, GiB"}
    controls: dict[str, Any] = {}
    for name, (value, choices) in offered.items():
        make = SelectionSlider if name in names else Dropdown
        controls[name] = make(options=choices, value=value, description=names.get(name, name))
    return controls
