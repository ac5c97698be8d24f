"""What is left of the training loop when Accelerate does the rest?

    accelerator = Accelerator(gradient_accumulation_steps=2)    # finds its place among N processes
    model, optimizer = accelerator.prepare(model, optimizer)    # DDP, or whatever is configured
    with accelerator.accumulate(model): …                       # no_sync but for the last
    accelerator.backward(loss)                                  # divides by the accumulation steps

    notebook_launch(prove_accelerate, num_processes=2)                      # from a notebook
    accelerate_launch("labsupport.train.accelerate_loop", num_processes=2)  # as a command

With another plugin the same lines shard:

    accelerator = make_accelerator(config, plugin=fsdp2_plugin)             # FSDP2
    notebook_launch(partial(prove_accelerate, plugin=fsdp2_plugin), num_processes=2)

The model, the batches, the loss by valid tokens and the schedule are those of `train_step`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labsupport.config import ModelConfig, TrainConfig
from labsupport.data import Batch
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama, token_loss
from labsupport.parallel.layout import Layout
from labsupport.train.optimizer import build_optimizer
from labsupport.train.proof import RankProof, compare
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    TrainedRun,
    build,
    proof_batches,
    train_alone,
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


def fsdp2_plugin() -> Any:
    """Each block by itself, as `fully_sharded` does, all from the weights of rank 0."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=True,  # rank 0 sends its weights; the others need none
    )


def make_accelerator(config: TrainConfig, *, plugin: Callable[[], Any] | None = None) -> Any:
    """Accelerate's DDP over all processes, or what `plugin`, as `fsdp2_plugin`, describes.

    Accelerate 1.15 takes a plugin for FSDP on accelerators only: on a CPU it would go on with DDP,
    without a word. Here it is told.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    made = None if plugin is None else plugin()
    accelerator = Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps, fsdp_plugin=made
    )
    if made is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = made
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def prove_accelerate(
    *,
    plugin: Callable[[], Any] | None = None,
    model: ModelConfig = PROOF_MODEL,
    config: TrainConfig = PROOF_CONFIG,
    steps: int = 3,
) -> RankProof:
    """Is this process's run that of one process alone? To be called in every process."""
    k = config.gradient_accumulation_steps
    accelerator = make_accelerator(config, plugin=plugin)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches = [proof_batches(step, config=config, world_size=world_size) for step in range(steps)]
    oracle = train_alone(
        model=model, config=config, steps=steps, dp_size=world_size, device=accelerator.device
    )
    mine = [batch[rank * k :][:k] for batch in batches]
    run = train_with_accelerate(accelerator, build(model, config, seed=rank), mine, config=config)
    return compare(run, oracle, layout=Layout(dp_rank=rank, dp_size=world_size))


def main() -> None:
    """Print this process's proof as a JSON line, for `accelerate launch`."""
    proof = prove_accelerate()
    print(json.dumps({"step": 0, "rank": proof.rank, "is_equal": proof.is_equal}))
    dist.destroy_process_group()  # gloo's threads, left to the end of Python, may abort it


if __name__ == "__main__":
    main()
