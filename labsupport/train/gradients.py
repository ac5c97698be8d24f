"""How long is the gradient of the whole model, and how is it kept short?

    |g| = √(sum of the squares of every gradient of every parameter)
    g   = g · min(1, largest / |g|)         one factor for all, so that the direction stays

    norm = gradient_norm([p.grad for p in model.parameters()])
    clip_gradients(gradients, norm=norm.item(), scale=1.0, largest=1.0)

A sharded gradient (DTensor) counts as a whole: every rank gets the norm of all shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm over all gradients together, a scalar in fp32, the same on every rank of a shard."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # sums over the shards


def clip_gradients(
    gradients: Sequence[Tensor], *, norm: float, scale: float, largest: float | None
) -> None:
    """Divide the gradients, of length `norm`, by the loss scale and cut them to `largest`."""
    factor = 1 / scale
    if largest is not None:
        factor *= min(1.0, largest / (norm / scale + 1e-6))
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
