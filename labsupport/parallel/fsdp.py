"""Fully sharded data parallelism: every rank keeps 1/n of each weight, gradient and moment.

    all-gather a block's weights -> compute -> free them        reduce-scatter its gradients

    model = fully_sharded(Llama(config), compute_dtype=torch.bfloat16)
    optimizer = build_optimizer(model, train_config)    # after: the parameters are new ones
    loss.backward(); optimizer.step()                   # on this rank's shards only

Each block is a unit, gathered by itself: one is whole while the next one's bytes arrive. What is in
no block (embedding, last norm, lm_head) belongs to the root, which stays whole until the backward
is through with it; tied embeddings are one parameter of it. Hybrid (HSDP): shards within a group
of ranks, copies across groups:

    mesh (dp_replicate 2, dp_shard 2)    rank 0 [A] rank 1 [B]    gradients: reduce-scatter →
                                         rank 2 [A] rank 3 [B]    then all-reduce of shards ↓
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from labsupport.parallel.agree import send_first_weights
from labsupport.parallel.zero.prepare import places_of
from labsupport.parallel.zero.stage3 import blocks_of


def fully_sharded(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    blocks_per_unit: int = 1,
    cpu_offload: bool = False,
) -> FSDPModule:
    """Shard `model` in place over `mesh`, from the weights of the mesh's first rank.

    A block is an element of an outermost nn.ModuleList or nn.Sequential, as in `zero3`. Raises
    ValueError if one shares a parameter with anything outside of it.

    mesh: one axis, or two, (dp_replicate, dp_shard); left out: all ranks in one axis. A model that
    is tensor-parallel already, over another axis of the same mesh, is cut further.
    compute_dtype: weights are gathered and used in it; shards, gradients and their sum stay fp32.
    reshard_after_forward: free a block after its forward and gather it again for the backward;
    False gathers once and keeps it.
    blocks_per_unit: blocks that are gathered together: fewer messages, higher peak.
    cpu_offload: shards, gradients and optimizer state live in host memory; GPUs only.

    A model on the meta device is cut too; give it weights with `meta_init.init_shards`. Switch the
    exchange off with `set_requires_gradient_sync(False)` for all backwards of a step but the last.
    """
    blocks = list(blocks_of(model))
    if not 1 <= blocks_per_unit <= max(1, len(blocks)):
        raise ValueError(f"{blocks_per_unit=} must be in 1…{len(blocks)} (blocks), for example 1")
    _check_shared(model, blocks)
    mesh = mesh or _all_ranks(model)
    for axis in range(mesh.ndim):  # the first rank of all is the source: all are cut from one model
        send_first_weights(model, mesh.get_group(axis))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _precision(compute_dtype),
        "offload_policy": _offload(mesh, cpu_offload=cpu_offload),
    }
    for first in range(0, len(blocks), blocks_per_unit):
        unit = blocks[first : first + blocks_per_unit]
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    # The root's backward begins where its forward ended: to free it in between saves nothing.
    sharded = fully_shard(model, reshard_after_forward=False, **options)
    model.register_forward_hook(_free_without_backward)
    return sharded


def _free_without_backward(model: nn.Module, *_: object) -> None:
    """After an evaluation, or whole weights would outlive what an optimizer or a checkpoint does
    to the shards."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _check_shared(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    unit_of = {module: block for block in blocks for module in block.modules()}
    names = {param: name for name, param in model.named_parameters()}
    for param, places in places_of(model).items():
        if len({unit_of.get(module) for module, _ in places}) > 1:
            raise ValueError(
                f"{names[param]} is shared across units, and fully_shard would make two of it; use "
                f"parallel.zero.zero3, which gives it to the root"
            )


def _all_ranks(model: nn.Module) -> DeviceMesh:
    device = next(model.parameters()).device
    if device.type == "meta":  # not there yet: it will be where the ranks' messages are
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def _precision(compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if compute_dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)


def _offload(mesh: DeviceMesh, *, cpu_offload: bool) -> OffloadPolicy:
    if not cpu_offload:
        return OffloadPolicy()
    if mesh.device_type == "cpu":
        raise ValueError(
            "cpu_offload=True keeps the shards of a GPU's model in host memory, and this model is "
            "in host memory already; use cpu_offload=False, or move the model to a GPU first"
        )
    return CPUOffloadPolicy()
