"""Which mode of activation checkpointing fits into a GPU, and how many FLOPs more does it cost?

recompute_trade(model="1b", micro_batch_size=4, seq_len=8192, memory_gb=80)
"""

from __future__ import annotations

from typing import Any

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.config import MixedPrecision, ModelConfig, Recompute
from labsupport.plan import flops_per_token, training_memory
from labsupport.plots import LabFigure
from labsupport.widgets.live_picture import LivePicture

MODELS = ("tiny", "15m", "125m", "1b", "llama-3.1-8b")
BATCHES = tuple(2**power for power in range(8))
LENGTHS = tuple(2**power for power in range(7, 18))
PRECISIONS: tuple[MixedPrecision, ...] = ("fp32", "bf16", "bf16-pure")
MEMORIES_GB = (16, 24, 40, 80, 141, 180)
MODES = ("none", "every-4", "every-2", "selective", "full", "offload")


def recompute_trade(
    *,
    model: str = "1b",
    micro_batch_size: int = 4,
    seq_len: int = 8192,
    precision: MixedPrecision = "bf16",
    memory_gb: int = 80,
) -> LivePicture:
    """Menus over the predicted peak of each mode, its extra FLOPs, and a device's memory.

    Raises ValueError with the choices for what is not offered.
    """
    offered: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "model": (model, MODELS),
        "micro_batch_size": (micro_batch_size, BATCHES),
        "seq_len": (seq_len, LENGTHS),
        "precision": (precision, PRECISIONS),
        "memory_gb": (memory_gb, MEMORIES_GB),
    }
    names = {"micro_batch_size": "sequences", "seq_len": "tokens each", "memory_gb": "GPU, GB"}
    controls: dict[str, Any] = {}
    for name, (value, choices) in offered.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not offered; one of {choices}")
        make = SelectionSlider if name in names else Dropdown
        controls[name] = make(options=choices, value=value, description=names.get(name, name))
    return LivePicture(draw=_draw, controls=controls)


def _draw(
    model: str, micro_batch_size: int, seq_len: int, precision: MixedPrecision, memory_gb: int
) -> LabFigure:
    config = ModelConfig.named(model)
    bars = {}
    for mode in MODES:
        recompute = Recompute.parse(mode)
        plan = training_memory(
            config,
            micro_batch_size=micro_batch_size,
            seq_len=seq_len,
            precision=precision,
            recompute=recompute,
            on_gpu=True,
        )
        flops = flops_per_token(
            config, seq_len=min(seq_len, config.max_seq_len), causal=True, recompute=recompute
        )
        extra = flops.recompute_flops / flops.training_flops
        bars[f"{mode}, +{extra:.0%} FLOPs"] = plan.bytes_of
    figure = plots.memory_bars(
        bars,
        limit_bytes=memory_gb * 1e9,
        title=f"{model}, {micro_batch_size} × {seq_len:,} tokens: predicted peak of a step",
    )
    for total in figure.axes[0].texts:
        if total.get_horizontalalignment() == "left":  # beside its bar; the dashed line may cross
            total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    return figure
