"""Where does one rank stand among all, and what does it therefore do with a micro batch?

    rank = ((dp_replicate · |dp_shard| + dp_shard) · |cp| + cp) · |tp| + tp

    global batch   cut by sequences over dp_replicate × dp_shard     tokens of a sequence over cp
    tp             the same tokens, another part of every layer

    layout = Layout.build(ParallelConfig(data_parallel_size=2, tensor_parallel_size=2))
    model = fully_sharded(tensor_parallel(model, layout.mesh["tp"]), mesh=layout.fsdp_mesh)
    train_step(model, optimizer, micro_batches, config=config, step=0, layout=layout)

Ranks of one tp group are neighbours: what they exchange is the most, and in every layer.
A rank of plain data parallelism needs only a group: `Layout.of_group(group)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from labsupport.config import ParallelConfig
from labsupport.parallel.context.zigzag import shard_sequence

AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of this rank; everything follows from the mesh, or from a single group."""

    mesh: DeviceMesh | None = None
    """Axes dp_replicate, dp_shard, cp, tp, those of size 1 too; None: only data parallelism."""
    group: dist.ProcessGroup | None = None
    """All ranks of the run, which decide together about each step; None: one process."""
    loss_group: dist.ProcessGroup | None = None
    """dp × cp: their losses are added up, and gradients are averaged over them."""
    dp_rank: int = 0
    """Which piece of the global batch is this rank's."""
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    """Between the layers each tp rank holds other tokens."""

    @classmethod
    def build(cls, parallel: ParallelConfig, *, device_type: str = "cpu") -> Self:
        """The place of this rank in a mesh over all ranks; every rank must call it.

        Raises ValueError where `parallel` is not for the number of ranks that there are.
        """
        if dist.get_world_size() != parallel.world_size:
            raise ValueError(
                f"{parallel.world_size} ranks are laid out, but {dist.get_world_size()} are there; "
                f"use ParallelConfig.for_world_size({dist.get_world_size()}, …)"
            )
        sizes = tuple(parallel.mesh[name] for name in AXES)
        mesh = _mesh(device_type, sizes, dist.group.WORLD)
        replicate, shard, cp_rank, tp_rank = (mesh.get_local_rank(name) for name in AXES)
        return cls(
            mesh=mesh,
            group=dist.group.WORLD,
            loss_group=_flat(mesh, "dp_replicate", "dp_shard", "cp").get_group(),
            dp_rank=replicate * parallel.mesh["dp_shard"] + shard,
            dp_size=parallel.data_parallel_size,
            cp_rank=cp_rank,
            cp_size=parallel.context_parallel_size,
            tp_rank=tp_rank,
            tp_size=parallel.tensor_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
        )

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None) -> Self:
        """One of the data-parallel ranks of `group`, or the only process."""
        if group is None:
            return cls()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(group=group, loss_group=group, dp_rank=rank, dp_size=size)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def rank(self) -> int:
        """Of all ranks."""
        return (self.dp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What weights are sharded over: dp_shard × cp, and first dp_replicate where there is one.

        Under context parallelism ranks differ in their tokens, not in their weights: for the
        weights they are further data-parallel ranks.
        """
        assert self.mesh is not None, "a layout of a group has no mesh"
        shards = _flat(self.mesh, "dp_shard", "cp")
        if self.mesh["dp_replicate"].size() == 1:
            return shards
        return DeviceMesh._concatenate([self.mesh["dp_replicate"], shards])

    @property
    def ddp_mesh(self) -> DeviceMesh:
        """The same two axes for weights that are copied over all of dp × cp, and not sharded."""
        assert self.mesh is not None, "a layout of a group has no mesh"
        return DeviceMesh._concatenate(
            [_flat(self.mesh, "dp_replicate", "cp"), self.mesh["dp_shard"]]
        )

    @property
    def loss_mesh(self) -> DeviceMesh:
        """dp × cp as one axis, which gradients are averaged over."""
        assert self.mesh is not None, "a layout of a group has no mesh"
        return _flat(self.mesh, "dp_replicate", "dp_shard", "cp")

    @property
    def activation_rank(self) -> int:
        """A number that ranks share whose blocks see the same activations: seeds their dropout."""
        rank = self.dp_rank * self.cp_size + self.cp_rank
        return rank * self.tp_size + self.tp_rank if self.sequence_parallel else rank

    def shard_sequence(self, tensor: Tensor) -> Tensor:
        """This rank's tokens of (batch, seq) or (seq,): all but under context parallelism."""
        if self.cp_size == 1:
            return tensor
        return shard_sequence(tensor, self.cp_rank, self.cp_size)

    def positions(self, seq_len: int, *, device: torch.device) -> Tensor | None:
        """Where this rank's tokens stand in the text; None: from 0 on."""
        if self.cp_size == 1:
            return None
        return self.shard_sequence(torch.arange(seq_len, device=device))

    @contextmanager
    def loss_context(self) -> Iterator[None]:
        """For the loss and its backward pass: logits stay split by vocabulary over tp."""
        if self.mesh is None:
            yield
            return
        try:
            with loss_parallel():
                yield
        except BaseException:
            with loss_parallel():  # torch leaves it switched on then: once more, to the end
                pass
            raise


@lru_cache(maxsize=32)
def _mesh(device_type: str, sizes: tuple[int, ...], world: dist.ProcessGroup) -> DeviceMesh:
    """One mesh a shape: every group of ranks costs each of them connections and two threads.

    `world` says of which ranks: a group that was left and made anew is another one.
    """
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def _flat(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The ranks of several axes as one; the same one each time."""
    return mesh[axes]._flatten("_".join(axes))
