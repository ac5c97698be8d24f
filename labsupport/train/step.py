"""What does one training step do, on one rank or many?

    loss  = sum over all ranks' valid tokens of -log p / number of them      (not a mean of means)
    g     = its gradient; |g| its norm over all parameters, as in one process
    w     = optimizer(w, g · min(1, grad_clip / |g|)), unless loss or |g| is not finite

    micro_batches = data.batch(step, seq_len=128, global_batch_size=32).micro_batches(4)
    result = train_step(model, optimizer, micro_batches, config=config, step=step)
    result.loss, result.grad_norm, result.num_tokens

In one process this is the oracle. On one of many ranks, `model` is a wrapper that averages
gradients over `group` (DDP, FSDP2, those of labsupport.parallel), or over the data- and
context-parallel ranks of `layout`; the sums of a rank are multiplied by the number of those first,
so that the average of sums is the global sum. One small message after the backward pass tells all
how many tokens counted, and whether all is finite: a NaN on one rank skips the step on all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.config import TrainConfig
from labsupport.data import Batch
from labsupport.model import token_loss
from labsupport.parallel.layout import Layout
from labsupport.train.gradients import clip_gradients, gradient_norm

if TYPE_CHECKING:
    from labsupport.train.precision import Precision

Group = dist.ProcessGroup


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank."""

    loss: float
    """Mean over the valid tokens of the global batch, before the update, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    num_tokens: int
    """Valid tokens of the global batch."""
    skipped: bool = False
    """Loss or gradient was not finite: weights and optimizer state are as before."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks whose own loss was not finite; empty too where only the gradient overflowed (fp16)."""
    loss_scale: float = 1.0
    """What the loss was multiplied by before backward; 1 without a GradScaler."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    config: TrainConfig,
    step: int,
    precision: Precision | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: Group | None = None,
    layout: Layout | None = None,
) -> StepResult:
    """One optimizer step on the micro batches of this rank; every rank must call it.

    `micro_batches` is this data-parallel rank's piece of the global batch: ranks that differ by
    tensor or context parallelism only are given the same. The place of the rank is `layout`, or,
    where all ranks are data-parallel, `group`.

    Raises ValueError for no micro batch on this rank (one of padding will do), on all ranks for a
    global batch without a valid token, and for an optimizer that holds other tensors than `model`.
    """
    place = Layout.of_group(group) if layout is None else layout
    micro_batches = [_tokens_of(place, batch) for batch in micro_batches]
    loss_sum = accumulate_gradients(
        model,
        micro_batches,
        config=config,
        step=step,
        precision=precision,
        scaler=scaler,
        layout=place,
    )
    gradients = _gradients(model, optimizer)
    loss_scale = scaler.get_scale() if scaler is not None else 1.0
    # Tensor-parallel ranks have the same loss and tokens: each tells its share of them.
    tokens_here = sum(batch.num_tokens for batch in micro_batches) / place.tp_size
    loss_sums, norm, num_tokens = _tell_all(
        loss_sum / place.tp_size, gradient_norm(gradients), tokens_here, group=place.group
    )
    if num_tokens == 0:
        raise ValueError("the global batch has no valid token; at least one label must count")
    # The backward pass divided by the tokens of a full batch; only now all know how many counted.
    scale = loss_scale * num_tokens / full_batch_tokens(config, dp_size=place.dp_size)
    finite = all(math.isfinite(number) for number in (*loss_sums, norm))
    learning_rate = config.learning_rate_at(step)
    if finite:
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate
        clip_gradients(gradients, norm=norm, scale=scale, largest=config.grad_clip)
        optimizer.step()
    if scaler is not None:
        adapt_scale(scaler, overflowed=not finite)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=sum(loss_sums) / num_tokens,
        grad_norm=norm / scale,
        learning_rate=learning_rate,
        num_tokens=num_tokens,
        skipped=not finite,
        nonfinite_ranks=_ranks_of([not math.isfinite(loss) for loss in loss_sums], place.group),
        loss_scale=loss_scale,
    )


def full_batch_tokens(config: TrainConfig, *, dp_size: int) -> int:
    """Valid tokens of a global batch without padding: what every rank knows before it starts."""
    sequences = config.micro_batch_size * config.gradient_accumulation_steps * dp_size
    return sequences * config.seq_len


def _tokens_of(layout: Layout, batch: Batch) -> Batch:
    """What of the batch this rank sees: under context parallelism, a part of each sequence."""
    return replace(
        batch,
        input_ids=layout.shard_sequence(batch.input_ids),
        labels=layout.shard_sequence(batch.labels),
    )


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    config: TrainConfig,
    step: int,
    layout: Layout,
    precision: Precision | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Forward and backward of every micro batch, holding this rank's tokens; its summed loss, fp64.

    Afterwards the gradients are those of all ranks' loss sums over `full_batch_tokens` (times the
    scaler's scale), on all ranks. They are exchanged once, in the last micro batch's backward pass.
    """
    if not micro_batches:
        raise ValueError("this rank has no micro batch; give every rank one, if only of padding")
    device, total = _device(model), torch.zeros((), dtype=torch.float64, device=_device(model))
    averaged = layout.dp_size * layout.cp_size  # ranks, after backward
    factor = averaged / full_batch_tokens(config, dp_size=layout.dp_size)

    def where(batch: Batch) -> dict[str, Tensor]:
        """Positions in the text, where they are not 0, 1, 2, …"""
        positions = layout.positions(batch.input_ids.shape[-1] * layout.cp_size, device=device)
        return {} if positions is None else {"positions": positions}

    for i, batch in enumerate(micro_batches):
        if config.dropout:
            seed_dropout(config.seed, step=step, rank=layout.activation_rank, micro_batch=i)
        with _synchronised(model, now=i == len(micro_batches) - 1), layout.loss_context():
            with precision.autocast() if precision is not None else nullcontext():
                logits = model(batch.input_ids.to(device, non_blocking=True), **where(batch))
            loss = token_loss(logits, batch.labels.to(device, non_blocking=True)).sum
            del logits  # the graph of the loss keeps what the backward pass needs of it
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            share = loss * factor
            scaled = share if scaler is None else scaler.scale(share)
            scaled.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    finish = getattr(model, "finish_gradient_sync", None)
    if finish is not None:
        finish()  # a hand-written wrapper waits here for what is still under way
    return total


def seed_dropout(seed: int, *, step: int, rank: int, micro_batch: int) -> None:
    """Make the dropout masks of one micro batch follow from where it stands in the run.

    A run repeats, and resumes at any step; another layout of ranks draws other masks.
    """
    torch.manual_seed(random.Random(f"{seed}/{step}/{rank}/{micro_batch}").getrandbits(63))


def adapt_scale(scaler: torch.amp.GradScaler, *, overflowed: bool) -> None:
    """Halve the loss scale after an overflow, double it after `growth_interval` steps without.

    As `scaler.update()` does, but from the decision of all ranks: left to itself, a scaler asks
    its own shard only, and ranks would go on with different scales.
    """
    state: dict[str, Any] = scaler.state_dict()
    state["_growth_tracker"] = 0 if overflowed else state["_growth_tracker"] + 1
    if overflowed:
        state["scale"] *= state["backoff_factor"]
    elif state["_growth_tracker"] == state["growth_interval"]:
        state["scale"] *= state["growth_factor"]
        state["_growth_tracker"] = 0
    scaler.load_state_dict(state)


@contextmanager
def _synchronised(model: Any, *, now: bool) -> Iterator[None]:
    """Exchange gradients in this backward pass only if `now`; earlier ones add up locally."""
    switch = getattr(model, "set_requires_gradient_sync", None)  # FSDP2
    if switch is not None:
        switch(now)
    pause = getattr(model, "no_sync", None)  # DDP, and the hand-written wrappers
    paused: AbstractContextManager[object] = nullcontext() if now or pause is None else pause()
    with paused:
        yield


def _tell_all(
    loss_sum: Tensor, norm: Tensor, tokens_here: float, *, group: Group | None
) -> tuple[list[float], float, int]:
    """Loss sum of every rank, largest norm that any sees, all tokens: what all decide by, alike.

    Norms are equal on all ranks unless one is NaN, and then the result is NaN.
    """
    here = torch.stack((loss_sum, norm.double(), loss_sum.new_tensor(tokens_here)))
    if group is None:
        numbers = here.tolist()
    else:
        gathered = here.new_empty(3 * dist.get_world_size(group))
        dist.all_gather_single(gathered, here, group=group)  # 24 bytes from each rank to each
        numbers = gathered.tolist()
    loss_sums, norms = numbers[::3], numbers[1::3]
    norm_of_all = math.nan if any(map(math.isnan, norms)) else max(norms)
    return loss_sums, norm_of_all, round(sum(numbers[2::3]))


def _gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in held if param.grad is not None]
    strangers = set(held) - set(model.parameters())
    if strangers or not gradients:
        found = f"{len(strangers)} of {len(held)} tensors of the optimizer are not the model's"
        raise ValueError(
            f"{found if strangers else 'no parameter of the optimizer has a gradient'}; build it "
            f"after the model is wrapped or sharded, as in build_optimizer(model, config)"
        )
    return gradients


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _ranks_of(flags: Sequence[bool], group: Group | None) -> tuple[int, ...]:
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    return tuple(rank for rank, flag in zip(ranks, flags, strict=True) if flag)
