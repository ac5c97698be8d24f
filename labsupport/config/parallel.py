"""How many ranks split what?

world_size = data_parallel_size × tensor_ × pipeline_ × context_parallel_size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from labsupport.config.rules import at_least, divides, one_of, require

DataParallelSharding = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks split what. `world_size` follows from the sizes."""

    data_parallel_size: int = 1
    data_parallel_sharding: DataParallelSharding = "ddp"
    data_parallel_replicate_size: int = 1
    """hsdp only: groups that hold a full copy; inside each, the states are sharded."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    """Between the layers, tp ranks hold different tokens instead of copies of all."""

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name.endswith("_size")}
        at_least(1, **sizes)
        one_of("data_parallel_sharding", self.data_parallel_sharding, DataParallelSharding)
        one_of("pipeline_schedule", self.pipeline_schedule, PipelineSchedule)
        replicas, ranks = self.data_parallel_replicate_size, self.data_parallel_size
        divides("data_parallel_replicate_size", replicas, "data_parallel_size", ranks)
        if self.data_parallel_sharding != "hsdp" and replicas > 1:
            raise ValueError(f"data_parallel_replicate_size={replicas} is for hsdp only; use 1")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True splits what the tp ranks would hold twice, and "
                "tensor_parallel_size=1; use tensor_parallel_size=2, or leave it out"
            )

    @classmethod
    def for_world_size(cls, world_size: int, **sizes: Any) -> Self:
        """Give to data parallelism the ranks that the other `sizes` leave of `world_size`."""
        split = ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"]
        at_least(1, world_size=world_size, **{name: sizes.get(name, 1) for name in split})
        others = math.prod(sizes.get(name, 1) for name in split)
        rule, works = f"must be a multiple of {others} ({' × '.join(split)})", world_size // others
        require(world_size % others == 0, "world_size", world_size, rule, max(1, works) * others)
        return cls(**sizes, data_parallel_size=world_size // others)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.mesh.values())

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each axis of the device mesh, outermost first."""
        is_ddp = self.data_parallel_sharding == "ddp"
        dp_replicate = self.data_parallel_size if is_ddp else self.data_parallel_replicate_size
        return {
            "pp": self.pipeline_parallel_size,
            "dp_replicate": dp_replicate,
            "dp_shard": self.data_parallel_size // dp_replicate,
            "cp": self.context_parallel_size,
            "tp": self.tensor_parallel_size,
        }
