"""What is the whole model, if every rank holds a wrapped copy or a shard of it?

plain, DDP, FSDP2, by hand, checkpointed, compiled  ->  {name: whole CPU tensor} on rank 0

weights = full_state_dict(model)            # every rank must call it
list(weights)[:1]                           # ['model.embed_tokens.weight']; [] on other ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, on the CPU, under its name in transformers; {} on ranks but 0.

    A collective: shards are gathered one parameter at a time, so every rank must call it. Tensors
    of a model on the CPU share its memory: save them before training goes on.
    """
    state = get_model_state_dict(_unwrapped(model), options=_WHOLE)
    whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return whole if _is_first() else {}


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state likewise, by parameter name; call it while no gradients are kept."""
    state = get_optimizer_state_dict(_unwrapped(model), optimizer, options=_WHOLE)
    return state if _is_first() else {}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Inside DDP, a wrapper written by hand (`.module`) or torch.compile (`._orig_mod`)."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return model


def _is_first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0
