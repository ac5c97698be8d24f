"""Which parameters does which rule update?

    adamw   m, v = moving averages of g and g²;  w -= lr · (m̂ / (√v̂ + eps) + weight_decay · w)
    sgd     b = momentum · b + g + weight_decay · w;  w -= lr · b

    optimizer = build_optimizer(model, TrainConfig(optimizer="adamw"))
    [len(group["params"]) for group in optimizer.param_groups]      # matrices, then vectors

Build it after the model is wrapped or sharded: a strategy may put new tensors in the place of the
parameters, and an optimizer that holds the old ones changes nothing (`train_step` refuses it).
Shards on different meshes, and plain tensors beside shards, get groups of their own: one fused
pass takes tensors of one kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters, in one fused pass where the device has it.

    Vectors (the norms' weights) do not decay: pulling a scale to 0 is no regularisation.
    """
    trainable = [param for param in model.parameters() if param.requires_grad]
    alike: dict[tuple[bool, object], list[Tensor]] = {}
    for param in trainable:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        alike.setdefault((param.ndim <= 1, mesh), []).append(param)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": 0.0 if is_vector else config.weight_decay}
        for (is_vector, _), params in sorted(alike.items(), key=lambda item: item[0][0])
    ]
    fused = all(param.device.type in ("cpu", "cuda") for param in trainable)
    rate = config.learning_rate
    if config.optimizer == "sgd":
        # torch has a fused AdamW for the shards of FSDP2, but no fused SGD.
        fused = fused and not any(isinstance(param, DTensor) for param in trainable)
        # torch 2.13's fused SGD leaves bf16 parameters on a CPU as they are, without a word.
        fused &= all(param.dtype == torch.float32 for param in trainable)
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(
        groups, lr=rate, betas=config.adam_betas, eps=config.adam_eps, fused=fused
    )
