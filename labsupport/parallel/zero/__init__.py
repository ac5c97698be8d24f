"""ZeRO by hand: what does each rank hold, and what does it send, if states are sharded?

    stage   weights   gradients   optimizer   bytes on the link, DDP = 1
    zero1   all       all         1/n         1      reduce-scatter + all-gather
    zero2   all       1/n         1/n         1      the same, during the backward
    zero3   1/n       1/n         1/n         3/2    all-gather each block twice; reduce-scatter

    model = zero2(Llama(config))                     # in place; all ranks hold rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters())   # after: these are shards now, DTensors
    model(input_ids) … loss.backward(); optimizer.step(); optimizer.zero_grad()

In a loop of your own nothing else is needed: a backward exchanges gradients as it ends. Put all of
a step but the last under `with model.no_sync():`, or every one of them sends. After an error on all
ranks `zero_grad()` clears the step. To differentiate twice, take stage 1 or 2.

A module may be of any class, with frozen, shared and unused parameters. Move, cast and compile it
before; call it and its blocks as modules, since their hooks bring the whole weights. Buffers start
as rank 0's and are then each rank's own. Optimizers see DTensors: torch's work (LBFGS if all rows
divide evenly), but for Adafactor, Rprop and fused SGD or Adagrad, whose operators have no rule for
DTensors: they stop with torch's error. Muon asks for whole matrices and gets them, at the price of
messages of its own; its bf16 iteration rounds in another order than on one rank. Sparse gradients
become dense. `labsupport.parallel.fsdp` is torch's own stage 3.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from labsupport.parallel.zero.moments import Sharding
from labsupport.parallel.zero.prepare import check
from labsupport.parallel.zero.stage1 import Zero1
from labsupport.parallel.zero.stage2 import Zero2
from labsupport.parallel.zero.stage3 import Zero3

Model = TypeVar("Model", bound=nn.Module)


def zero1(
    model: Model, mesh: DeviceMesh | None = None, *, compute_dtype: torch.dtype | None = None
) -> Model:
    """Shard the optimizer's state over `mesh` (1-D; all ranks by default), from rank 0's weights.

    With `compute_dtype` whole weights are gathered and used in it; shards, gradients and their sums
    stay in the type of `model`. Raises ValueError for a model that has no values, or is sharded.
    """
    return _shard(model, mesh, compute_dtype, Zero1)


def zero2(
    model: Model, mesh: DeviceMesh | None = None, *, compute_dtype: torch.dtype | None = None
) -> Model:
    """Shard gradients too; arguments as for `zero1`."""
    return _shard(model, mesh, compute_dtype, Zero2)


def zero3(
    model: Model, mesh: DeviceMesh | None = None, *, compute_dtype: torch.dtype | None = None
) -> Model:
    """Shard weights too; every rank must use the same blocks and parameters in the same order."""
    return _shard(model, mesh, compute_dtype, Zero3)


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, whole, under its name, on every rank; all of them must call it."""
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }


def _shard(
    model: Model, mesh: DeviceMesh | None, compute_dtype: torch.dtype | None, stage: type[Sharding]
) -> Model:
    check(model, compute_dtype)
    if mesh is None:
        device_type = next(model.parameters()).device.type
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} axes {mesh.mesh_dim_names} and must have 1; give one of "
            f'them, for example mesh["dp_shard"]'
        )
    sharding, given = stage(model, mesh, compute_dtype), vars(model)
    given["no_sync"] = sharding.no_sync
    given["finish_gradient_sync"] = sharding.finish_gradient_sync
    return model
