"""What is left of the training step when DeepSpeed does the rest?

    engine = deepspeed_engine(build_model(…), deepspeed_config(2, config=config))
    engine.backward(loss)       # divides by the accumulation steps, averages over ranks
    engine.step()               # updates at the last micro batch of a step, and clears gradients

    result = deepspeed_step(engine, micro_batches, config=config, step=0)      # as train_step does

The model, the batches, the loss by valid tokens, the clipping and the schedule are those of
`train_step`. What is not: stages 2 and 3 exchange gradients after every micro batch, since each
rank keeps only its part of their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labsupport.config import TrainConfig
from labsupport.data import Batch
from labsupport.model import token_loss
from labsupport.train.step import StepResult


def deepspeed_step(
    engine: Any, micro_batches: Sequence[Batch], *, config: TrainConfig, step: int
) -> StepResult:
    """One optimizer step on the micro batches of this rank; every rank must call it.

    Raises ValueError for another number of micro batches than the engine was set up for: it would
    update at the wrong one.
    """
    wanted = engine.gradient_accumulation_steps()
    if len(micro_batches) != wanted:
        raise ValueError(
            f"{len(micro_batches)} micro batches, but the engine was set up for {wanted} a step: "
            f"give {wanted}, or set gradient_accumulation_steps={len(micro_batches)}"
        )
    for group in engine.optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    num_tokens = torch.tensor(sum(b.num_tokens for b in micro_batches), device=engine.device)
    dist.all_reduce(num_tokens)  # every rank tells how many of its tokens count: 8 bytes
    # The average over ranks and micro batches that DeepSpeed takes, undone.
    share = dist.get_world_size() * wanted / num_tokens
    loss_sum = torch.zeros((), device=engine.device)
    for batch in micro_batches:
        logits = engine(batch.input_ids.to(engine.device))
        loss = token_loss(logits, batch.labels.to(engine.device)).sum
        engine.backward(loss * share)
        engine.step()
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum)  # and its loss: 4 bytes
    return StepResult(
        loss=(loss_sum / num_tokens).item(),
        grad_norm=float(engine.get_global_grad_norm()),
        learning_rate=config.learning_rate_at(step),
        num_tokens=int(num_tokens),
    )
