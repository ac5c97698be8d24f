"""Fully sharded data parallelism: every rank keeps 1/n of each weight, gradient and moment.

    all-gather a block's weights -> compute -> free them        reduce-scatter its gradients

    model = fully_sharded(Llama(config), compute_dtype=torch.bfloat16)
    optimizer = build_optimizer(model, train_config)    # after: the parameters are new ones
    loss.backward(); optimizer.step()                   # on this rank's shards only

Each block is gathered by itself, so that at most two are whole at a time; embedding, last norm and
lm_head belong to the root. Tied embeddings are one parameter of the root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from labsupport.model import Llama


def fully_sharded(
    model: Llama, *, mesh: DeviceMesh | None = None, compute_dtype: torch.dtype | None = None
) -> FSDPModule:
    """Shard `model` over `mesh` (all ranks by default), in place, from rank 0's weights.

    With `compute_dtype` weights are gathered and used in it, while shards, gradients and their sum
    stay as they are. Switch the exchange off with `set_requires_gradient_sync(False)` for all
    backwards of a step but the last.
    """
    device = next(model.parameters()).device
    if mesh is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for tensor in (*model.parameters(), *model.buffers()):
        for axis in range(mesh.ndim):  # rank 0 sends its weights: the shards are cut from one model
            dist.broadcast(tensor.detach(), group=mesh.get_group(axis), group_src=0)
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
