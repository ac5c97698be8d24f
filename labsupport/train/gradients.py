"""How long is the gradient of the whole model, and how is it kept short?

    |g| = √(sum of the squares of every gradient of every parameter)
    g   = g · min(1, largest / |g|)         one factor for all, so that the direction stays

    norm = gradient_norm([p.grad for p in model.parameters()])
    clip_gradients(gradients, norm=norm.item(), scale=1.0, largest=1.0)

A sharded gradient (DTensor) counts as a whole: every rank gets the norm of all shards. Plain ones
and replicated ones count once. Gradients may lie on different meshes, as a norm's weight and a
split matrix do under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Axes = tuple[dist.ProcessGroup, ...]


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm over all gradients together, a scalar in fp32, the same on every rank of a shard."""
    norms = torch._foreach_norm(_local(gradients), 2, dtype=torch.float32)
    alike: dict[Axes, list[Tensor]] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        alike.setdefault(_split_over(gradient), []).append(norm)
    lengths = {axes: torch.linalg.vector_norm(torch.stack(some)) for axes, some in alike.items()}
    squares = {axes: length.double().square() for axes, length in lengths.items()}
    for axis in dict.fromkeys(group for axes in squares for group in axes):
        split = [axes for axes in squares if axis in axes]
        sums = torch.stack([squares[axes] for axes in split])
        dist.all_reduce(sums, group=axis)  # 8 bytes for each way of being split, to each rank
        squares.update(zip(split, sums, strict=True))
    return torch.stack(list(squares.values())).sum().sqrt().float()


def clip_gradients(
    gradients: Sequence[Tensor], *, norm: float, scale: float, largest: float | None
) -> None:
    """Divide the gradients, of length `norm`, by the loss scale and cut them to `largest`."""
    factor = 1 / scale
    if largest is not None:
        factor *= min(1.0, largest / (norm / scale + 1e-6))
    if factor != 1.0:
        torch._foreach_mul_(_local(gradients), factor)


def _local(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What of each lies on this rank."""
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def _split_over(gradient: Tensor) -> Axes:
    """The groups, one for each axis of its mesh, whose ranks hold different parts of it."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(place.is_partial() for place in placements), "a gradient was not reduced yet"
    return tuple(
        mesh.get_group(axis)
        for axis, place in enumerate(placements)
        if not place.is_replicate() and mesh.size(axis) > 1
    )
