"""Predictions on paper: what a layout would need and take, before anything runs.

Standard library only: a plan can be made on a machine without torch. One file a question.

    from labsupport.plan import communication
    communication.ring_all_reduce(size_bytes=2**20, world_size=8).link_bytes     # 1835008.0
"""

from labsupport.plan.compute import (
    ParamCount,
    TokenFlops,
    count_params,
    flops_per_token,
    hfu,
    mfu,
)
from labsupport.plan.memory import TrainingMemory, training_memory
from labsupport.plan.tensor_parallel import TensorParallelCalls, tensor_parallel_calls
from labsupport.plan.tensor_parallel_step import TensorParallelTime, tensor_parallel_time

__all__ = [
    "ParamCount",
    "TensorParallelCalls",
    "TensorParallelTime",
    "TokenFlops",
    "TrainingMemory",
    "count_params",
    "flops_per_token",
    "hfu",
    "mfu",
    "tensor_parallel_calls",
    "tensor_parallel_time",
    "training_memory",
]
