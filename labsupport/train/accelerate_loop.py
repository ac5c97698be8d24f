"""What is left of the training loop when Accelerate does the rest?

    accelerator = Accelerator(gradient_accumulation_steps=2)    # finds its place among N processes
    model, optimizer = accelerator.prepare(model, optimizer)    # DDP, or whatever is configured
    with accelerator.accumulate(model): …                       # no_sync but for the last
    accelerator.backward(loss)                                  # divides by the accumulation steps

    notebook_launch(prove_accelerate, num_processes=2)                      # from a notebook
    accelerate_launch("labsupport.train.accelerate_loop", num_processes=2)  # as a command

The model, the batches, the loss by valid tokens and the schedule are those of `train_step`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labsupport.config import ModelConfig, TrainConfig
from labsupport.data import Batch
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama, token_loss
from labsupport.train.optimizer import build_optimizer
from labsupport.train.proof import RankProof, compare
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    TrainedRun,
    build,
    proof_batches,
    train,
    whole_tensors,
)


def train_with_accelerate(
    accelerator: Any, model: Llama, batches: Iterable[Sequence[Batch]], *, config: TrainConfig
) -> TrainedRun:
    """Train on this process's micro batches, a list a step; to be called in every process.

    `accelerator` is an `accelerate.Accelerator` with the config's gradient_accumulation_steps.
    """
    run, k = TrainedRun(), config.gradient_accumulation_steps
    largest = math.inf if config.grad_clip is None else config.grad_clip
    model, optimizer = accelerator.prepare(model, build_optimizer(model, config))
    for step, micro_batches in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        mine = sum(batch.num_tokens for batch in micro_batches)
        num_tokens = accelerator.reduce(torch.tensor(mine, device=accelerator.device))
        # The average over ranks and micro batches that Accelerate takes, undone.
        share = accelerator.num_processes * k / num_tokens
        loss_sum = torch.zeros((), device=accelerator.device)
        with count_collective_bytes() as counted:
            for batch in micro_batches:
                with accelerator.accumulate(model):
                    logits = model(batch.input_ids.to(accelerator.device))
                    loss = token_loss(logits, batch.labels.to(accelerator.device)).sum
                    accelerator.backward(loss * share)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), largest)
                        run.gradients.append(whole_tensors(model, "grad"))
                        run.grad_norms.append(norm.item())
                    optimizer.step()
                    optimizer.zero_grad()
                    loss_sum += loss.detach()
        run.losses.append((accelerator.reduce(loss_sum) / num_tokens).item())
        run.exchanged_bytes = counted.gradient_bytes
    run.weights = whole_tensors(model, "data")
    return run


def prove_accelerate(
    *, model: ModelConfig = PROOF_MODEL, config: TrainConfig = PROOF_CONFIG, steps: int = 3
) -> RankProof:
    """Is this process's run that of one process alone? To be called in every process."""
    from accelerate import Accelerator

    k = config.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=k)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches = [proof_batches(step, config=config, world_size=world_size) for step in range(steps)]
    oracle = train(build(model, config, seed=0, device=accelerator.device), batches, config=config)
    mine = [batch[rank * k :][:k] for batch in batches]
    run = train_with_accelerate(accelerator, build(model, config, seed=rank), mine, config=config)
    return compare(run, oracle, rank=rank, world_size=world_size)


def main() -> None:
    """Print this process's proof as a JSON line, for `accelerate launch`."""
    proof = prove_accelerate()
    print(json.dumps({"step": 0, "rank": proof.rank, "is_equal": proof.is_equal}))
    dist.destroy_process_group()  # gloo's threads, left to the end of Python, may abort it


if __name__ == "__main__":
    main()
