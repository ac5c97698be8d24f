"""What has to hold before a model is sharded, and how do whole weights come in afterwards?

check(model, compute_dtype)                     # ValueError for a model that has no values, …
places_of(model)[param]                         # all modules and names that a parameter has
model.load_state_dict(plain.state_dict())       # every rank takes its rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.parallel.zero.shards import Piece, Place


def check(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Raise ValueError, before anything is sent, for what cannot be sharded."""
    params = dict(model.named_parameters())
    if not params:
        raise ValueError(f"{type(model).__name__} has no parameters to shard; use it as it is")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"{compute_dtype=} is no type to compute in; give torch.bfloat16 or None")
    for name, param in params.items():
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is a shard already; give the model as it was built, before any strategy"
            )
        if param.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values; build the model on a device, or "
                f"use parallel.fsdp, which shards first and fills the shards afterwards"
            )


def places_of(model: nn.Module) -> Mapping[nn.Parameter, Sequence[Place]]:
    """Every parameter, in the order of the model, with all modules and names it has: a tied one
    has several."""
    places: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append((module, name))
    return places


def cut_whole_weights(
    pieces: Sequence[Piece], model: nn.Module, state: dict[str, Any], prefix: str
) -> None:
    """Before `load_state_dict`: of each whole weight this rank takes its rows."""
    by_shard = {id(piece.shard): piece for piece in pieces}
    for name, param in model.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if not isinstance(given, Tensor) or isinstance(given, DTensor):
            continue
        if given.shape == param.shape:  # torch itself complains of another shape
            state[prefix + name] = by_shard[id(param)].part_of(given)
