"""Does tensor parallelism pay on my link? Computing against waiting, for a width and a link.

tensor_parallel_link(link="pcie4-x16", hidden_size=4096, tensor_parallel_size=8)
tensor_parallel_link(link="here", measured={"here": my_points})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ipywidgets import Dropdown, SelectionSlider

from labsupport import plots
from labsupport.config import ModelConfig
from labsupport.plan.gradient_sync import Link
from labsupport.plan.links import roads
from labsupport.plan.tensor_parallel_step import tensor_parallel_time
from labsupport.plots import LabFigure
from labsupport.widgets.live_picture import LivePicture

SIZES = (2, 4, 8, 16)
WIDTHS = tuple(2**power for power in range(7, 15))
RATES_TFLOPS = (25, 50, 100, 200, 400, 800)
"""What a device reaches in 16-bit matrix products, 10^12 FLOP/s."""
TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What a learner found on a machine: its two numbers, its speed, and steps that were timed."""

    link: Link
    flops_per_s: float
    """Of one rank alone."""
    micro_batch_size: int
    seq_len: int
    bytes_per_number: int = 4
    utilisation: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(ranks, hidden size) -> time alone / (ranks · time of the split step)."""


def model_of_width(hidden_size: int) -> ModelConfig:
    """A Llama of 4 layers, three times as wide between them, that up to 16 ranks can share."""
    return ModelConfig(
        vocab_size=2048,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=4,
        num_heads=32,
        num_kv_heads=16,
        max_seq_len=TOKENS,
    )


def tensor_parallel_link(
    *,
    link: str = "nvlink4",
    tflops: int = 400,
    hidden_size: int = 4096,
    tensor_parallel_size: int = 8,
    measured: Mapping[str, MeasuredLink] | None = None,
) -> LivePicture:
    """Menus over `plots.tensor_parallel_link`; `measured` adds the learner's machines to the links.

    One sequence of 4,096 tokens in bf16, on a device that reaches `tflops`. A measured link has its
    own speed, tokens and type. Raises ValueError for what is not offered.
    """
    here, roads_ = dict(measured or {}), roads()
    offered = {
        "link": (link, (*here, *roads_)),
        "tflops": (tflops, RATES_TFLOPS),
        "hidden_size": (hidden_size, WIDTHS),
        "tensor_parallel_size": (tensor_parallel_size, SIZES),
    }
    for name, (value, choices) in offered.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not offered; one of {choices}")
    controls = {
        "link": Dropdown(
            options=[*((name, name) for name in here), *((r.name, k) for k, r in roads_.items())],
            value=link,
            description="link",
        ),
        "tflops": SelectionSlider(options=RATES_TFLOPS, value=tflops, description="TFLOP/s"),
        "hidden_size": SelectionSlider(options=WIDTHS, value=hidden_size, description="hidden"),
        "tensor_parallel_size": SelectionSlider(
            options=SIZES, value=tensor_parallel_size, description="ranks"
        ),
    }

    def draw(link: str, tflops: int, hidden_size: int, tensor_parallel_size: int) -> LabFigure:
        case = here.get(link) or _on(roads_[link], tflops)
        name = link if link in here else roads_[link].name
        return plots.tensor_parallel_link(
            {
                size: {
                    width: tensor_parallel_time(
                        model_of_width(width),
                        tensor_parallel_size=size,
                        micro_batch_size=case.micro_batch_size,
                        seq_len=case.seq_len,
                        flops_per_s=case.flops_per_s,
                        link=case.link,
                        bytes_per_number=case.bytes_per_number,
                    )
                    for width in WIDTHS
                }
                for size in SIZES
            },
            size=tensor_parallel_size,
            hidden_size=hidden_size,
            name=name,
            measured=case.utilisation,
        )

    return LivePicture(draw=draw, controls=controls)


def _on(link: Link, tflops: int) -> MeasuredLink:
    """A link of the table, with a device that nobody has timed on it."""
    return MeasuredLink(
        link=link,
        flops_per_s=tflops * 1e12,
        micro_batch_size=1,
        seq_len=TOKENS,
        bytes_per_number=2,
    )
