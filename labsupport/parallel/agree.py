"""What must data-parallel ranks agree on that no gradient tells them?

before the first step   the weights: those of rank 0
after each backward     which parameters have a gradient: those that any rank has used

send_first_weights(model, group)                       # all ranks now hold rank 0's
used_on_any_rank([p.grad is not None for p in params], group, device=device)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def send_first_weights(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Every rank of `group` gets the weights and buffers of its rank 0; nothing on meta."""
    for tensor in (*model.parameters(), *model.buffers()):
        here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if here.numel() and not here.is_meta:
            sent = here.contiguous()
            # Rank 0 sends all bytes of the tensor to every other rank, once.
            dist.broadcast(sent, group=group, group_src=0)
            here.copy_(sent)


def used_on_any_rank(
    used_here: Sequence[bool], group: dist.ProcessGroup | None, *, device: torch.device
) -> list[bool]:
    """For each parameter: did any rank compute a gradient?"""
    if not used_here:
        return []
    # One byte a parameter: 1 if I have one; the maximum is 1 if anyone has.
    used = torch.tensor(used_here, dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in used.tolist()]
