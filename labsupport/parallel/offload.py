"""Where else could activations wait for the backward pass? In host memory, over a slow link.

    forward    device --copy--> host      one copy of each tensor that autograd saves
    backward   device <--copy-- host      when its turn comes

    time on the link = 2 × bytes / bandwidth: worth it where computing again would take longer

    h = run_with_host_copies(block, h, rotary)     # h as ever; what backward needs is on the host

`torch.autograd.graph.save_on_cpu` does the same for everything that is saved, the weights
included, and copies a tensor as often as it is saved. Here weights stay, and what three
projections saved is copied once. Copies wait in line with the computation (same stream), so their
time is not hidden; libraries that hide it fetch the next block's tensors ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Packed = tuple[torch.device, Tensor]


def run_with_host_copies(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call `function`, a module or its `forward`; what autograd saves inside lies on the host."""
    module = getattr(function, "__self__", function)
    weights = module.parameters() if isinstance(module, nn.Module) else ()
    stay = {weight.untyped_storage().data_ptr() for weight in weights}
    copies: dict[tuple[object, ...], tuple[Tensor, Packed]] = {}
    with saved_tensors_hooks(partial(_to_host, stay=stay, copies=copies), _to_device):
        result = function(*args, **kwargs)
    copies.clear()
    return result


def _to_host(
    tensor: Tensor, *, stay: set[int], copies: dict[tuple[object, ...], tuple[Tensor, Packed]]
) -> Packed:
    storage = tensor.untyped_storage().data_ptr()
    if storage in stay:  # a weight, or a view of one
        return tensor.device, tensor
    # The original is held until the function ends: freed, its address could get another tensor.
    place = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    key = (*place, tensor.dtype, tensor._version)
    if key not in copies:
        pinned = tensor.is_cuda
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        copies[key] = (tensor, (tensor.device, host.copy_(tensor, non_blocking=pinned)))
    return copies[key][1]


def _to_device(packed: Packed) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
