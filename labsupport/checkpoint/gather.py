"""What is the whole model, if every rank holds a wrapped copy or a shard of it?

plain, DDP, ZeRO, FSDP2, tensor-parallel, checkpointed, compiled  ->  {name: whole CPU tensor}

weights = full_state_dict(model)            # every rank must call it
list(weights)[:1]                           # ['model.embed_tokens.weight']; [] on ranks but 0
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, on the CPU, under its name in transformers; {} on ranks but 0.

    A collective: shards are gathered one parameter at a time, so every rank must call it. Tensors
    of a model on the CPU share its memory: save them before training goes on.
    """
    with _quietly():
        state = get_model_state_dict(_unwrapped(model), options=_WHOLE)
    whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return whole if _is_first() else {}


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state likewise, by parameter name; call it while no gradients are kept.

    Parameters with the same settings are one group, in the order of the model, as in one process.
    """
    inner = _unwrapped(model)
    with _quietly():
        state = get_optimizer_state_dict(inner, optimizer, options=_WHOLE)
    if not _is_first():
        return {}
    names = [name for name, _ in inner.named_parameters()]
    return {**state, "param_groups": _merged(list(state["param_groups"]), names)}


def _merged(groups: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = {key: value for key, value in sorted(group.items()) if key != "params"}
        one = merged.setdefault(repr(settings), {**settings, "params": []})
        one["params"] = sorted(one["params"] + group["params"], key=names.index)
    return list(merged.values())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard, on every rank, each of which must call it; others stay."""
    with _quietly():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's advice that a tensor cut along two axes of a mesh takes two all-gathers."""
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Inside DDP, a wrapper written by hand (`.module`) or torch.compile (`._orig_mod`)."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return model


def _is_first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0
