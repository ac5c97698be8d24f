"""Two libraries shard the same training run: what does one rank then hold, send, and compute?

    RECIPES                 fully_shard (torch's FSDP2), DeepSpeed's ZeRO-1, 2, 3, and with offload

    runs = ranks.run(run_recipe, "ZeRO-3", model=COMPARED_MODEL, config=COMPARED_CONFIG)
    runs[0].held_bytes["gradients"], runs[0].exchanged_bytes["all_gather"], runs[0].step_s

Every recipe trains the same model from the same weights on the same batches, and is compared with
one process. Held is what a rank keeps of the states at its fullest moment between two micro batches
or before the update, with what the library needs for itself; sent is what it hands to collectives.
`library_table` puts the recipes side by side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from labsupport.config import ModelConfig, TrainConfig
from labsupport.data import Batch
from labsupport.devices import synchronize
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.measure.memory_tensors import key_of, tensors_in
from labsupport.model import Llama
from labsupport.parallel import deepspeed
from labsupport.parallel.fsdp import fully_sharded
from labsupport.train.deepspeed_loop import deepspeed_step
from labsupport.train.optimizer import build_optimizer
from labsupport.train.precision import Precision
from labsupport.train.proof import largest_difference
from labsupport.train.proof_run import build, proof_batches, train_alone, whole_tensors
from labsupport.train.step import StepResult, train_step

RECIPES: dict[str, dict[str, Any]] = {
    "fully_shard": {},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-2, optimizer on host": {"stage": 2, "offload_optimizer": True},
    "ZeRO-3, all on host": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}
"""Name -> what `deepspeed_config` is asked for; nothing for torch's own fully_shard."""
CATEGORIES = ("parameters", "gradients", "master", "optimizer", "other")
"""Of held bytes; see `parallel.deepspeed.held_tensors`."""
COMPARED_MODEL = ModelConfig.named("tiny")
COMPARED_CONFIG = TrainConfig(
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    seq_len=64,
    warmup_steps=1,
    adam_eps=1e-4,  # with 1e-8 Adam blows the rounding noise of a zero gradient up to a full step
)


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One recipe on one rank."""

    losses: tuple[float, ...]
    """Of the steps that one process took too."""
    grad_norms: tuple[float, ...]
    loss_difference: float
    """Largest relative difference of any of these from one process."""
    norm_difference: float
    weight_difference: float
    """Of any weight after these steps, relative to the largest of its tensor."""
    held_bytes: Mapping[str, int]
    """By `CATEGORIES`."""
    exchanged_bytes: Mapping[str, int]
    """Collective -> bytes handed to it in a step."""
    step_s: float
    """Median of the steps after these; nan where there were none."""


@dataclass(frozen=True)
class _Library:
    """What the two have in common, seen from the loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    """torch's own, in both: the update passes through it."""
    step: Callable[[Sequence[Batch], int], StepResult]
    weights: Callable[[], dict[str, Tensor]]
    held: Callable[[], Mapping[str, Iterable[Any]]]
    close: Callable[[], None]


def run_recipe(
    recipe: str,
    *,
    model: ModelConfig,
    config: TrainConfig,
    steps: int = 3,
    timed_steps: int = 0,
) -> RecipeRun:
    """Train by one of `RECIPES`, and beside it in one process; to be called on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    oracle = train_alone(model=model, config=config, steps=steps, dp_size=world_size, device=device)
    # Weights that no other rank has: rank 0's have to come.
    mine = build(model, config, seed=rank, device=device)
    asked = RECIPES[recipe]
    library = _deepspeed(mine, config, asked) if asked else _fully_shard(mine, config)
    k, losses, norms, times_s = config.gradient_accumulation_steps, [], [], []
    try:
        for step in range(steps + timed_steps):
            batches = proof_batches(step, config=config, world_size=world_size)[rank * k :][:k]
            if step == steps - 1:  # not the first, which sets things up
                result, held, exchanged = _watched(library, batches, step)
            else:
                synchronize(device)
                start = time.perf_counter()
                result = library.step(batches, step)
                synchronize(device)
                times_s.append(time.perf_counter() - start)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if step == steps - 1:
                weights = library.weights()
    finally:
        library.close()
    return RecipeRun(
        losses=tuple(losses[:steps]),
        grad_norms=tuple(norms[:steps]),
        loss_difference=_largest(losses, oracle.losses),
        norm_difference=_largest(norms, oracle.grad_norms),
        weight_difference=largest_difference(weights, oracle.weights),
        held_bytes=held,
        exchanged_bytes=exchanged,
        step_s=statistics.median(times_s[steps - 1 :]) if timed_steps else float("nan"),
    )


def _deepspeed(model: Llama, config: TrainConfig, asked: dict[str, Any]) -> _Library:
    engine = deepspeed.deepspeed_engine(model, deepspeed.deepspeed_config(config=config, **asked))
    return _Library(
        engine.module,
        engine.optimizer.optimizer,
        lambda batches, step: deepspeed_step(engine, batches, config=config, step=step),
        lambda: deepspeed.full_parameters(engine),
        lambda: deepspeed.held_tensors(engine),
        engine.destroy,
    )


def _fully_shard(model: Llama, config: TrainConfig) -> _Library:
    precision = Precision.named(config.mixed_precision, device=next(model.parameters()).device.type)
    sharded = fully_sharded(model, compute_dtype=precision.compute_dtype)
    optimizer, everyone = build_optimizer(model, config), dist.group.WORLD

    def step(batches: Sequence[Batch], number: int) -> StepResult:
        return train_step(
            sharded,  # type: ignore[arg-type]
            optimizer,
            batches,
            config=config,
            step=number,
            precision=precision,
            group=everyone,
        )

    def held() -> dict[str, list[Any]]:
        params = list(model.parameters())
        return {
            "parameters": params,
            "gradients": [*(param.grad for param in params), *_between_micro_batches(model)],
            "optimizer": list(optimizer.state.values()),
        }

    return _Library(
        model, optimizer, step, lambda: whole_tensors(model, "data"), held, lambda: None
    )


def _between_micro_batches(model: nn.Module) -> Iterator[Tensor | None]:
    """Whole gradients that fully_shard adds up on each rank until they are exchanged."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    yield param.unsharded_accumulated_grad
                    yield getattr(getattr(param, "_unsharded_param", None), "grad", None)


def _watched(
    library: _Library, batches: Sequence[Batch], step: int
) -> tuple[StepResult, dict[str, int], dict[str, int]]:
    """A step, what was held at its fullest moment, and what each collective was given."""
    moments: list[dict[str, int]] = []

    def note(*_: object) -> None:
        moments.append(_bytes_of(library.held()))

    hooks = (
        library.model.register_forward_pre_hook(note, prepend=True),  # nothing is gathered yet
        library.optimizer.register_step_pre_hook(note),
    )
    with count_collective_bytes() as counted:
        result = library.step(batches, step)
    for hook in hooks:
        hook.remove()
    fullest = max(moments, key=lambda held: sum(held.values()))
    return result, fullest, {name: sum(sizes) for name, sizes in counted.sizes_bytes.items()}


def _bytes_of(held: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """Bytes by category; memory that stands in two counts in the first."""
    seen: set[int] = set()
    found = dict.fromkeys(CATEGORIES, 0)
    for category, values in held.items():
        for tensor in tensors_in(values):
            if key_of(tensor) not in seen:
                seen.add(key_of(tensor))
                found[category] += tensor.untyped_storage().nbytes()
    return found


def _largest(these: Sequence[float], those: Sequence[float]) -> float:
    """Relative difference; `these` may go on for longer."""
    return max(abs(a - b) / abs(b) for a, b in zip(these, those, strict=False))
