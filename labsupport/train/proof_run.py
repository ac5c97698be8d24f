"""The small training run that a proof of equality is about, and what is kept of it.

    run = train_alone(model=PROOF_MODEL, config=PROOF_CONFIG, steps=3, dp_size=2)
    run.losses, run.gradients[0]["lm_head.weight"], run.weights["lm_head.weight"]

The case is unkind on purpose: ranks count different numbers of valid tokens, gradients are added up
over micro batches and clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.checkpoint import whole
from labsupport.config import IGNORE_INDEX, ModelConfig, TrainConfig
from labsupport.data import Batch
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.layout import Layout
from labsupport.train.assemble import build_model
from labsupport.train.optimizer import build_optimizer
from labsupport.train.precision import Precision
from labsupport.train.step import train_step

PROOF_MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)
PROOF_CONFIG = TrainConfig(
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    seq_len=8,
    warmup_steps=1,
    grad_clip=0.5,
    adam_eps=1e-4,  # with 1e-8 Adam blows the rounding noise of a zero gradient up to a full step
)


@dataclass
class TrainedRun:
    """What a few steps left behind, whole tensors by their name in `Llama`."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, as the optimizer got them."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    exchanged_bytes: int = 0
    """Gradient bytes that the last step handed to collectives."""


def train_alone(
    wrap: Callable[[Llama], nn.Module] | None = None,
    *,
    model: ModelConfig,
    config: TrainConfig,
    steps: int,
    dp_size: int,
    device: torch.device | str = "cpu",
) -> TrainedRun:
    """The oracle: one process on the global batches of `dp_size` data-parallel ranks."""
    batches = [proof_batches(step, config=config, world_size=dp_size) for step in range(steps)]
    alone = build(model, config, seed=0, device=device)
    return train(wrap(alone) if wrap else alone, batches, config=config)


def train_in(
    layout: Layout,
    wrap: Callable[[Llama], nn.Module],
    *,
    model: ModelConfig,
    config: TrainConfig,
    steps: int,
    device: torch.device | str = "cpu",
) -> TrainedRun:
    """The same batches, this rank's part of each; `wrap` is to put rank 0's weights in place.

    Tensor-parallel ranks begin with the same weights, and all others with different ones.
    """
    k, size = config.gradient_accumulation_steps, layout.dp_size
    batches = [proof_batches(step, config=config, world_size=size) for step in range(steps)]
    mine = [batch[layout.dp_rank * k :][:k] for batch in batches]
    seed = layout.dp_rank * layout.cp_size + layout.cp_rank
    wrapped = wrap(build(model, config, seed=seed, device=device))
    return train(wrapped, mine, config=config, layout=layout)


def build(
    model: ModelConfig, config: TrainConfig, *, seed: int, device: torch.device | str = "cpu"
) -> Llama:
    """The model with its precision and recomputation, not yet wrapped."""
    precision = Precision.named(config.mixed_precision, device=str(device))
    return build_model(model, replace(config, seed=seed), precision=precision, device=device)


def train(
    model: nn.Module,
    batches: Iterable[Sequence[Batch]],
    *,
    config: TrainConfig,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
) -> TrainedRun:
    """Some steps of `train_step`, written down."""
    run, optimizer = TrainedRun(), build_optimizer(model, config)
    optimizer.register_step_pre_hook(lambda *_: run.gradients.append(whole_tensors(model, "grad")))
    device = next(model.parameters()).device
    precision = Precision.named(config.mixed_precision, device=str(device))
    scaler = precision.grad_scaler(init_scale=2.0**10)  # small, so that no step is skipped
    for step, micro_batches in enumerate(batches):
        with count_collective_bytes() as counted:
            result = train_step(
                model,
                optimizer,
                micro_batches,
                config=config,
                step=step,
                precision=precision,
                scaler=scaler,
                group=group,
                layout=layout,
            )
        run.exchanged_bytes = counted.gradient_bytes
        run.losses.append(result.loss)
        run.grad_norms.append(result.grad_norm)
    run.weights = whole_tensors(model, "data")
    return run


def proof_batches(step: int, *, config: TrainConfig, world_size: int) -> list[Batch]:
    """The micro batches of all ranks, in order, of random tokens; later ranks count fewer."""
    generator = torch.Generator().manual_seed(step)
    count = config.gradient_accumulation_steps * world_size
    shape = (count, config.micro_batch_size, config.seq_len + 1)
    tokens = torch.randint(PROOF_MODEL.vocab_size, shape, generator=generator)
    labels = tokens[..., 1:].clone()
    for i in range(count):
        labels[i, :, config.seq_len - i * (config.seq_len - 1) // count :] = IGNORE_INDEX
    return [Batch(tokens[i, :, :-1].contiguous(), labels[i]) for i in range(count)]


def whole_tensors(model: nn.Module, what: str) -> dict[str, Tensor]:
    """Copies of every parameter's "grad" or "data" by name; shards are put together."""
    root: nn.Module = getattr(model, "module", model)
    found = {}
    for name, param in root.named_parameters():
        tensor = getattr(param, what)
        if tensor is not None:
            found[name] = whole(tensor).detach().clone()
    return found
