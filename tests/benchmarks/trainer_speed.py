"""Is the trainer as fast as a plain loop over transformers' Llama, and over torch's DDP?

    python tests/benchmarks/trainer_speed.py                  # ratios; nothing is asserted
    python tests/benchmarks/trainer_speed.py --model 15m --steps 20

Both sides of a pair run in one process and take turns, step by step, in an order that alternates,
so that a slow second hits both. They have the same shape, weights, batches, threads, loss, clipping
and fused AdamW. A ratio is the median over all pairs of (trainer's step / plain step).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from labsupport import Ranks
from labsupport.config import ModelConfig, TrainConfig
from labsupport.data import Batch, load_corpus
from labsupport.model import Llama
from labsupport.parallel.ddp import data_parallel
from labsupport.train import build_optimizer
from labsupport.train.loop import train

WARM_UP = 5


def ours(model: torch.nn.Module, config: TrainConfig, group: Any = None) -> Iterator[object]:
    return train(model, build_optimizer(model, config), load_corpus(), config, group=group)


def plain(
    model: torch.nn.Module,
    config: TrainConfig,
    batches: list[Batch],
    loss_of: Callable[[Batch], torch.Tensor],
) -> Iterator[float]:
    """What people write by hand; one batch a step."""
    optimizer = build_optimizer(model, config)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def alternate(first: Iterator[object], second: Iterator[object], *, steps: int) -> list[float]:
    """Ratio of the times of each pair of steps, first / second."""
    ratios = []
    for pair in range(steps):
        seconds = {}
        for side in ((first, second), (second, first))[pair % 2]:
            start = time.perf_counter()
            next(side)
            seconds[side] = time.perf_counter() - start
        ratios.append(seconds[first] / seconds[second])
    return ratios[WARM_UP:]


def against_transformers(name: str, config: TrainConfig) -> list[float]:
    shape = ModelConfig.named(name)
    mine = Llama(shape)
    theirs = LlamaForCausalLM(LlamaConfig(**shape.to_hf(), use_cache=False))
    theirs.load_state_dict(mine.state_dict())
    batches = all_batches(config, rank=0, world_size=1)

    def loss_of(batch: Batch) -> torch.Tensor:
        labels = batch.labels  # already the next tokens: `shift_labels` says so
        return theirs(input_ids=batch.input_ids, labels=labels, shift_labels=labels).loss

    return alternate(
        ours(mine, config), plain(theirs, config, batches, loss_of), steps=config.steps
    )


def against_ddp(name: str, config: TrainConfig) -> list[float]:
    """On one rank of two."""
    shape, rank = ModelConfig.named(name), dist.get_rank()
    mine = data_parallel(Llama(shape))
    theirs = DistributedDataParallel(Llama(shape), gradient_as_bucket_view=True)
    batches = all_batches(config, rank=rank, world_size=2)

    def loss_of(batch: Batch) -> torch.Tensor:
        logits = theirs(batch.input_ids).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch.labels.flatten())

    by_hand = plain(theirs, config, batches, loss_of)
    return alternate(ours(mine, config, dist.group.WORLD), by_hand, steps=config.steps)


def all_batches(config: TrainConfig, *, rank: int, world_size: int) -> list[Batch]:
    corpus = load_corpus()
    size = config.micro_batch_size * world_size
    return [
        corpus.batch(
            step,
            seq_len=config.seq_len,
            global_batch_size=size,
            rank=rank,
            world_size=world_size,
        )
        for step in range(config.steps)
    ]


def show(what: str, ratios: list[float], target: float) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{what:<48} {middle:.3f} (middle half {low:.3f}…{high:.3f}, "
        f"{len(ratios)} pairs; target at most {target:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()
    config = TrainConfig(micro_batch_size=given.batch_size, steps=given.steps + WARM_UP)
    print(f"{given.model}, batch {given.batch_size} × {config.seq_len} tokens, fp32")
    with Ranks(2) as ranks:
        ratios = ranks.run(against_ddp, given.model, config)[0]
        threads = ranks.run(torch.get_num_threads)[0]
    show(f"trainer / hand-written DDP loop, 2 × {threads} threads", ratios, 1.02)
    ratios = against_transformers(given.model, config)
    show(f"trainer / transformers, 1 × {torch.get_num_threads()} threads", ratios, 1.0)


if __name__ == "__main__":
    main()
