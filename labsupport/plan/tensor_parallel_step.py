"""Is a rank of a tensor-parallel layer computing, or waiting for the sum?

    compute         FLOPs of the step / n / what a rank reaches
    communication   one after the other, nothing hides them:  calls · ring(b·s·h, n)  on the link
    utilisation     compute / (compute + communication)
    speedup         n · utilisation          below 1, one device alone would be quicker

    h100 = {"flops_per_s": 500e12, "micro_batch_size": 1, "seq_len": 4096}
    on_nvlink = {"link": roads()["nvlink4"], **h100}
    llama = ModelConfig.named("llama-3.1-8b")
    tensor_parallel_time(llama, tensor_parallel_size=8, **on_nvlink).utilisation       # 0.71
    largest_size(llama, (2, 4, 8, 16), least_utilisation=0.7, **on_nvlink)             # 8

The rank computes its own part of every matrix and of the heads; norms and the loss take no time.
`plan.tensor_parallel` counts what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labsupport.config import ModelConfig
from labsupport.plan.communication import (
    Collective,
    all_gather,
    predict,
    reduce_scatter,
    ring_all_reduce,
)
from labsupport.plan.compute import flops_per_token
from labsupport.plan.gradient_sync import Link
from labsupport.plan.tensor_parallel import Kind, tensor_parallel_calls

COST: dict[Kind, Collective] = {
    "all_reduce": ring_all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


@dataclass(frozen=True, kw_only=True)
class TensorParallelTime:
    """A step of one rank. Label: predicted, by FLOPs and alpha-beta."""

    tensor_parallel_size: int
    compute_s: float
    latency_s: float
    """Of all collectives: what a small message costs."""
    transfer_s: float
    """Of all collectives: bytes / bandwidth."""

    @property
    def communication_s(self) -> float:
        """All collectives; all ranks wait meanwhile."""
        return self.latency_s + self.transfer_s

    @property
    def step_s(self) -> float:
        """Computing and waiting."""
        return self.compute_s + self.communication_s

    @property
    def utilisation(self) -> float:
        """Share of the step in which a rank computes."""
        return self.compute_s / self.step_s

    @property
    def speedup(self) -> float:
        """Against one rank alone, which computes all and waits for nobody."""
        return self.tensor_parallel_size * self.utilisation


def tensor_parallel_time(
    config: ModelConfig,
    *,
    tensor_parallel_size: int,
    micro_batch_size: int,
    seq_len: int,
    flops_per_s: float,
    link: Link,
    bytes_per_number: int = 2,
    sequence_parallel: bool = False,
) -> TensorParallelTime:
    """One micro batch, forward and backward; `flops_per_s` is what a rank reaches, not its peak.

    Raises ValueError for a speed that is not positive and for what cannot be split.
    """
    if flops_per_s <= 0:
        raise ValueError(f"{flops_per_s=} must be positive, for example 500e12")
    traffic = tensor_parallel_calls(
        config,
        tensor_parallel_size=tensor_parallel_size,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        bytes_per_number=bytes_per_number,
        sequence_parallel=sequence_parallel,
    )
    flops = flops_per_token(config, seq_len=seq_len, causal=False).training_flops
    times = [
        (
            calls.count,
            predict(
                COST[calls.kind](size_bytes=calls.size_bytes, world_size=tensor_parallel_size),
                latency_s=link.latency_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            ),
        )
        for calls in traffic.calls
    ]
    return TensorParallelTime(
        tensor_parallel_size=tensor_parallel_size,
        compute_s=flops * traffic.num_tokens / tensor_parallel_size / flops_per_s,
        latency_s=sum(count * time.latency_s for count, time in times),
        transfer_s=sum(count * time.transfer_s for count, time in times),
    )


def largest_size(
    config: ModelConfig, sizes: Sequence[int], *, least_utilisation: float, **step: Any
) -> int:
    """The largest of `sizes` at which ranks compute at least that share of the time; 1 if none.

    `step` is the rest of `tensor_parallel_time`.
    """
    return max(
        (
            size
            for size in sizes
            if tensor_parallel_time(config, tensor_parallel_size=size, **step).utilisation
            >= least_utilisation
        ),
        default=1,
    )
