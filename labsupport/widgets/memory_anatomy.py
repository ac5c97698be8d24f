"""What would a training step hold? Choose model, batch, length, precision, optimizer and more.

memory_anatomy(model="1b", seq_len=8192, precision="bf16")
memory_anatomy(models={"mine": config}, model="mine", measured=timeline.peak(step=2).bytes_of)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.config import MixedPrecision, ModelConfig, Recompute
from labsupport.plan import TrainingMemory, training_memory
from labsupport.plots import LabFigure
from labsupport.widgets.live_picture import LivePicture

MODELS = ("tiny", "15m", "125m", "1b", "llama-3.1-8b")
BATCHES = tuple(2**power for power in range(8))
LENGTHS = tuple(2**power for power in range(5, 18))
OPTIMIZERS = {"adamw": "adamw", "sgd, momentum": "sgd", "sgd, plain": "plain sgd"}
RECOMPUTE = ("none", "selective", "every-2", "every-4", "full", "offload")


def memory_anatomy(
    *,
    model: str = "1b",
    micro_batch_size: int = 1,
    seq_len: int = 8192,
    precision: MixedPrecision = "bf16",
    optimizer: str = "adamw",
    recompute: str = "none",
    models: Mapping[str, ModelConfig] | None = None,
    measured: Mapping[str, int] | None = None,
) -> LivePicture:
    """Menus over the prediction of `training_memory`, its peaks as stacked bars.

    `models` adds configurations by name. `measured`, category -> bytes, is the peak that you
    measured with the settings given here: it stands beside the prediction while they are chosen.
    `optimizer` may also be "plain sgd" (no momentum). Raises ValueError for what is not offered.
    """
    configs = {name: ModelConfig.named(name) for name in MODELS} | dict(models or {})
    offered: dict[str, tuple[Any, list[Any]]] = {
        "model": (model, list(configs)),
        "micro_batch_size": (micro_batch_size, list(BATCHES)),
        "seq_len": (seq_len, list(LENGTHS)),
        "precision": (precision, list(get_args(MixedPrecision))),
        "optimizer": (optimizer, list(OPTIMIZERS.values())),
        "recompute": (recompute, list(RECOMPUTE)),
    }
    for name, (value, choices) in offered.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not offered; one of {choices}")
    settings = {name: value for name, (value, _) in offered.items()}

    def draw(**chosen: Any) -> LabFigure:
        plan = _plan(configs[chosen["model"]], **{k: v for k, v in chosen.items() if k != "model"})
        bars = {
            "predicted, first step": plan.first_peak.bytes_of,
            "predicted, later": plan.bytes_of,
        }
        if measured is not None and chosen == settings:
            bars["measured, later"] = measured
        return plots.memory_bars(bars, title=_title(chosen["model"], plan))

    return LivePicture(draw=draw, controls=_controls(offered))


def _plan(config: ModelConfig, *, optimizer: str, recompute: str, **sizes: Any) -> TrainingMemory:
    return training_memory(
        config,
        **sizes,
        optimizer="adamw" if optimizer == "adamw" else "sgd",
        momentum=0.0 if optimizer == "plain sgd" else 0.9,
        recompute=Recompute.parse(recompute),
    )


def _title(model: str, plan: TrainingMemory) -> str:
    return f"{model}: {plan.num_params:,} parameters; fullest at: {plan.peak.name}"


def _controls(offered: Mapping[str, tuple[Any, list[Any]]]) -> dict[str, Any]:
    names = {"micro_batch_size": "sequences", "seq_len": "tokens each"}
    controls: dict[str, Any] = {}
    for name, (value, choices) in offered.items():
        slides = name in names
        options = list(OPTIMIZERS.items()) if name == "optimizer" else choices
        make = SelectionSlider if slides else Dropdown
        controls[name] = make(options=options, value=value, description=names.get(name, name))
    return controls
