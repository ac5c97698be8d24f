"""What share of the hardware's peak do so many tokens per second reach?

    MFU        = tokens/s · (6·N + 12·L·a·s) / peak      as it is published: all of the scores
    MFU causal = tokens/s · (6·N +  6·L·a·s) / peak      without the half that the mask removes
    HFU        = with what activation checkpointing computes again

    speed = speed_of(request.model, request.config, device=device, world_size=2)
    speed.shares(250_000)           # {"mfu": 0.41, "mfu_causal": 0.38, "hfu": 0.52}; None on a CPU

The peak is the datasheet's, of all ranks' devices, in the type of the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labsupport.config import ModelConfig, TrainConfig
from labsupport.hardware import accelerator_of
from labsupport.plan.compute import TokenFlops, flops_per_token, hfu, mfu

_PEAK = {"fp32": "fp32", "fp16": "fp16", "fp8": "fp8"}  # any other multiplies in bf16


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What turns tokens per second into shares of the peak."""

    flops: TokenFlops
    causal_flops: TokenFlops
    peak_flops_per_s: float | None
    """None: unknown."""

    def shares(self, tokens_per_second: float) -> dict[str, float | None]:
        """mfu, mfu_causal and hfu, as fractions."""
        speed, peak = tokens_per_second, self.peak_flops_per_s
        return {
            "mfu": mfu(self.flops, tokens_per_second=speed, peak_flops_per_s=peak),
            "mfu_causal": mfu(self.causal_flops, tokens_per_second=speed, peak_flops_per_s=peak),
            "hfu": hfu(self.flops, tokens_per_second=speed, peak_flops_per_s=peak),
        }


def speed_of(
    model: ModelConfig, config: TrainConfig, *, device: torch.device, world_size: int
) -> Speed:
    """The FLOPs of this model and the peak of these devices."""
    flops, causal = (
        flops_per_token(model, seq_len=config.seq_len, causal=causal, recompute=config.recompute)
        for causal in (False, True)
    )
    peak = None
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        accelerator = accelerator_of(card.name, card.total_memory)
        kind = _PEAK.get(config.mixed_precision, "bf16")
        peak = getattr(accelerator, f"{kind}_flops_per_s", None)
    total = None if peak is None else peak * world_size
    return Speed(flops=flops, causal_flops=causal, peak_flops_per_s=total)
