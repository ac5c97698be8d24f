"""How does a model start that is larger than the memory of one rank?

    meta device: shapes, no bytes  ->  cut on paper  ->  memory for this rank's shards  ->  weights

    with torch.device("meta"):
        model = Llama(config)                       # 0 bytes
    init_shards(fully_sharded(model), seed=0)       # as cut from Llama(config, seed=0), to the bit

Every rank draws each parameter whole, as one process would, keeps its piece and forgets the rest:
one whole parameter at a time. Works for any model whose parameters are shards (FSDP, ZeRO, tensor
parallel, both), on whatever mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def init_shards(model: Any, *, seed: int, device: torch.device | str | None = None) -> Any:
    """Give the shards of the Llama memory and the weights of `Llama(config, seed=seed)` there.

    device: where the shards are to live, if not where their mesh is (cpu_offload: "cpu").
    """
    _allocate(model, device)
    model.init_weights(seed=seed, put=lambda p, whole: _local(p).copy_(local_piece(whole, p)))
    return model


@torch.no_grad()
def load_shards(
    model: Model,
    weights: Mapping[str, Tensor] | None,
    *,
    device: torch.device | str | None = None,
) -> Model:
    """Fill the shards from the whole `weights` of rank 0, by parameter name; None elsewhere.

    Raises ValueError on all ranks if a name or shape does not fit.
    """
    _allocate(model, device)
    params = dict(model.named_parameters())
    problem = [_misfit(params, weights or {}) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(problem, src=0)  # a few bytes from rank 0 to all
    if problem[0]:
        raise ValueError(problem[0])
    for name, param in params.items():
        on = param.device_mesh.device_type if isinstance(param, DTensor) else param.device
        whole = torch.empty(param.shape, dtype=param.dtype, device=on)
        if weights is not None:
            whole.copy_(weights[name])
        dist.broadcast(whole, src=0)  # a whole parameter from rank 0 to all, one after the other
        _local(param).copy_(local_piece(whole, param))
    return model


def local_piece(whole: Tensor, sharded: Tensor) -> Tensor:
    """What this rank holds of `whole` if it is cut as `sharded` is; a view."""
    if not isinstance(sharded, DTensor):
        return whole
    # Not get_local_rank(): it asks the process group, and torch's caches may hand out a mesh equal
    # to this one whose groups are gone.
    mesh, here = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    assert here is not None, "this rank is not in the mesh"
    for axis, dim in _cuts(sharded.placements):
        index, pieces = here[axis], whole.chunk(mesh.size(axis), dim)
        # Fewer rows than ranks: the last ranks hold none.
        whole = pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)
    return whole


def _cuts(placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """(axis of the mesh, dim of the tensor) in the order of the cuts.

    Outer axes first; but what FSDP cuts out of a tensor-parallel shard is strided in the whole
    tensor, and comes after the inner axes.
    """
    cut = [(axis, p) for axis, p in enumerate(placements) if hasattr(p, "dim")]
    plain = [(axis, p.dim) for axis, p in cut if not hasattr(p, "split_factor")]
    strided = [(axis, p.dim) for axis, p in cut if hasattr(p, "split_factor")]
    return plain + strided[::-1]


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _allocate(model: nn.Module, device: torch.device | str | None) -> None:
    params = list(model.parameters())
    if not any(param.is_meta for param in params):
        return
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    model.to_empty(device=device or next((mesh.device_type for mesh in meshes), "cpu"))


def _misfit(params: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    wanted = {name: tuple(param.shape) for name, param in params.items()}
    given = {name: tuple(weights[name].shape) for name in wanted if name in weights}
    wrong = [name for name, shape in wanted.items() if given.get(name) != shape]
    if not wrong:
        return ""
    name = wrong[0]
    return (
        f"{len(wrong)} of {len(wanted)} parameters do not fit, first {name}: rank 0 gives "
        f"{given.get(name, 'nothing')}, the model has {wanted[name]}; load weights of the same "
        f"ModelConfig"
    )
