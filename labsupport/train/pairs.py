"""Which settings cannot be had together, each fine alone, and what can?

    check_pairs(config, parallel, compiled=False)       # ValueError: value, reason, what works

Asked before any rank starts; needs no torch.
"""

from __future__ import annotations

from labsupport.config import ParallelConfig, TrainConfig


def check_pairs(config: TrainConfig, parallel: ParallelConfig, *, compiled: bool) -> None:
    """Raise ValueError for the first pair that is not built."""
    sharding, tp = parallel.data_parallel_sharding, parallel.tensor_parallel_size
    if sharding in ("zero1", "zero2") and tp > 1:
        raise ValueError(
            f"data_parallel_sharding={sharding!r} cuts whole weights into rows, and "
            f"tensor_parallel_size={tp} leaves a rank parts of weights; use 'fsdp' or 'hsdp', "
            f"which cut parts further, or 'ddp'"
        )
    if config.mixed_precision.startswith("fp8") and tp > 1:
        raise ValueError(
            f"mixed_precision={config.mixed_precision!r} scales whole matrices, and "
            f"tensor_parallel_size={tp} leaves a rank parts of them; use 'bf16'"
        )
