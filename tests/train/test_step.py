"""One step on one rank or two: the same loss, norm, gradients and weights, padding or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport import Ranks
from labsupport.config import IGNORE_INDEX, ModelConfig, TrainConfig
from labsupport.data import Batch, pad_batch
from labsupport.model import Llama
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.train import StepResult, build_optimizer, train_step
from labsupport.train.step import adapt_scale

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
)
CONFIG = TrainConfig(
    optimizer="sgd", learning_rate=0.5, momentum=0.0, warmup_steps=0, grad_clip=0.5
)
LENGTHS = [17, 3, 9, 2, 5, 17, 4, 12]  # tokens of each sample: no two micro batches alike


def batch_of(lengths: Sequence[int]) -> Batch:
    """Samples of these lengths, padded to the longest; the same length gives the same tokens."""
    rows = [
        torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in lengths
    ]
    return pad_batch(rows, seq_len=16, pad_id=0)


@dataclass(frozen=True)
class Outcome:
    result: StepResult
    gradients: dict[str, Tensor]
    """As the optimizer saw them, clipped."""
    weights: dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def step_on(
    strategy: str,
    micro_batches: Sequence[Batch],
    *,
    config: TrainConfig = CONFIG,
    poison: bool = False,
    **how: Any,
) -> Outcome:
    """One step of a fresh model: in one process, or as this rank of a pool."""
    base = Llama(MODEL, dropout=config.dropout)
    group = None if strategy == "one" else dist.group.WORLD
    wrap = {"one": lambda m: m, "ddp": data_parallel, "fsdp": fully_sharded}[strategy]
    model: nn.Module = wrap(base)
    optimizer = build_optimizer(model, config)
    seen: dict[str, Tensor] = {}

    def look(*_: object) -> None:
        seen.update({name: whole(p.grad) for name, p in base.named_parameters()})

    optimizer.register_step_pre_hook(look)
    if poison:
        base.lm_head.register_forward_hook(lambda *call: call[-1] * math.nan)
    result = train_step(model, optimizer, micro_batches, config=config, step=0, group=group, **how)
    return Outcome(result, seen, {name: whole(p) for name, p in base.named_parameters()})


def on_rank(strategy: str, cut: int, **how: Any) -> Outcome:
    """Rank 0 takes the first `cut` samples, in as many micro batches; rank 1 the rest, in one."""
    if dist.get_rank() == 0:
        return step_on(strategy, [batch_of([n]) for n in LENGTHS[:cut]], **how)
    rest = LENGTHS[cut:]
    micro_batches = [batch_of(rest)] if strategy == "ddp" else [batch_of([n]) for n in rest]
    return step_on(strategy, micro_batches, **how)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# ---- one process ------------------------------------------------------------------------------


def test_loss_is_the_mean_over_valid_tokens() -> None:
    batch = batch_of(LENGTHS)
    logits = Llama(MODEL)(batch.input_ids).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
    valid = batch.labels.flatten() != IGNORE_INDEX
    result = step_on("one", [batch]).result
    assert result.num_tokens == int(valid.sum()) == sum(LENGTHS) - len(LENGTHS)
    assert result.loss == pytest.approx(losses[valid].mean().item(), abs=1e-6)


def test_accumulation_equals_one_big_batch() -> None:
    big = step_on("one", [batch_of(LENGTHS)])
    small = step_on("one", [batch_of([n]) for n in LENGTHS])
    assert small.result.loss == pytest.approx(big.result.loss, abs=1e-6)
    assert small.result.grad_norm == pytest.approx(big.result.grad_norm, rel=1e-6)
    assert largest_difference(small.gradients, big.gradients) < 1e-6
    assert largest_difference(small.weights, big.weights) < 1e-6


def test_norm_before_clipping_is_told_and_clipping_is_to_the_limit() -> None:
    micro_batches = [batch_of(LENGTHS)]
    free = TrainConfig(optimizer="sgd", warmup_steps=0, grad_clip=None)
    unclipped, clipped = step_on("one", micro_batches, config=free), step_on("one", micro_batches)
    norm = nn.utils.get_total_norm(unclipped.gradients.values())
    assert norm > 1
    assert unclipped.result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert clipped.result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    after = nn.utils.get_total_norm(clipped.gradients.values())
    assert after.item() == pytest.approx(0.5, rel=1e-4)


def test_rate_follows_warm_up_and_cosine() -> None:
    config = TrainConfig(steps=10, warmup_steps=4, learning_rate=0.1, optimizer="sgd")
    model = Llama(MODEL)
    optimizer = build_optimizer(model, config)
    rates = [
        train_step(model, optimizer, [batch_of([9])], config=config, step=step).learning_rate
        for step in range(10)
    ]
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}


def test_dropout_repeats_by_seed_and_differs_by_step_and_micro_batch() -> None:
    def loss(*, seed: int = 0, step: int = 0, times: int = 1) -> float:
        config = TrainConfig(dropout=0.5, seed=seed)
        model = Llama(MODEL, dropout=0.5)
        batches = [batch_of([17])] * times
        return train_step(
            model, build_optimizer(model, config), batches, config=config, step=step
        ).loss

    torch.manual_seed(1)
    first = loss()
    torch.manual_seed(2)  # what the process drew before does not matter
    assert loss() == first
    assert len({first, loss(seed=1), loss(step=1), loss(times=2)}) == 4


def test_vectors_do_not_decay() -> None:
    optimizer = build_optimizer(Llama(MODEL), TrainConfig(weight_decay=0.3))
    decay = {len(g["params"][0].shape): g["weight_decay"] for g in optimizer.param_groups}
    assert decay == {2: 0.3, 1: 0.0}
    assert isinstance(build_optimizer(Llama(MODEL), CONFIG), torch.optim.SGD)


def test_what_cannot_be_a_step_is_refused() -> None:
    model = Llama(MODEL)
    optimizer = build_optimizer(model, CONFIG)
    with pytest.raises(ValueError, match="give every rank one"):
        train_step(model, optimizer, [], config=CONFIG, step=0)
    padding = Batch(torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), IGNORE_INDEX))
    with pytest.raises(ValueError, match="no valid token"):
        train_step(model, optimizer, [padding], config=CONFIG, step=0)
    stale = build_optimizer(Llama(MODEL), CONFIG)  # of another model, as before sharding
    with pytest.raises(ValueError, match="after the model is wrapped or sharded"):
        train_step(model, stale, [batch_of([9])], config=CONFIG, step=0)
    optimizer = build_optimizer(model, CONFIG)
    model.model.layers[0] = Llama(MODEL).model.layers[0]  # a part is replaced, as by sharding it
    with pytest.raises(ValueError, match="9 of 21 tensors of the optimizer are not the model's"):
        train_step(model, optimizer, [batch_of([9])], config=CONFIG, step=0)


# ---- not finite -------------------------------------------------------------------------------


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [whole(t) for t in (*model.parameters(), *states)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value: float) -> None:
    config = TrainConfig(warmup_steps=0)
    model = Llama(MODEL)
    optimizer = build_optimizer(model, config)
    train_step(model, optimizer, [batch_of([9])], config=config, step=0)
    before = trained_state(model, optimizer)
    hook = model.lm_head.register_forward_hook(lambda *call: call[-1] * value)
    result = train_step(model, optimizer, [batch_of([9])], config=config, step=1)
    hook.remove()
    assert result.skipped
    assert result.nonfinite_ranks == (0,)
    assert all(map(torch.equal, before, trained_state(model, optimizer)))
    assert all(param.grad is None for param in model.parameters())
    assert not train_step(model, optimizer, [batch_of([9])], config=config, step=2).skipped


def test_scaled_loss_gives_the_same_step_and_an_overflow_halves_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plain, scaled = step_on("one", [batch_of([9])]), step_on("one", [batch_of([9])], scaler=scaler)
    assert scaled.result.loss_scale == 1024
    assert scaled.result.grad_norm == pytest.approx(plain.result.grad_norm, rel=1e-6)
    assert largest_difference(plain.weights, scaled.weights) < 1e-6
    step_on("one", [batch_of([9])], scaler=scaler)
    assert scaler.get_scale() == 2048  # two good steps
    over = torch.amp.GradScaler("cpu", init_scale=3e38)
    result = step_on("one", [batch_of([9])], scaler=over).result
    assert result.skipped
    assert result.nonfinite_ranks == ()  # no rank's loss was at fault
    assert over.get_scale() == pytest.approx(1.5e38)


def test_scale_moves_as_the_scaler_itself_would_move_it() -> None:
    ours, torchs = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in "ab")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in [False, False, True, False, False, False, False, True, True]:
        weight.grad = torch.tensor([math.inf if overflowed else 1.0])
        torchs.scale(torch.ones(()))
        ours.scale(torch.ones(()))
        torchs.step(optimizer)
        torchs.update()
        adapt_scale(ours, overflowed=overflowed)
        assert ours.state_dict() == torchs.state_dict()


# ---- two ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "cut"), [("ddp", 4), ("ddp", 3), ("ddp", 7), ("fsdp", 4)])
def test_two_ranks_with_unequal_tokens_equal_one_process(
    two: Ranks, strategy: str, cut: int
) -> None:
    oracle = step_on("one", [batch_of(LENGTHS)])
    tokens = [sum(n - 1 for n in part) for part in (LENGTHS[:cut], LENGTHS[cut:])]
    assert tokens[0] != tokens[1]
    for outcome in two.run(on_rank, strategy, cut):
        assert outcome.result.num_tokens == sum(tokens)
        assert outcome.result.loss == pytest.approx(oracle.result.loss, abs=1e-6)
        assert outcome.result.grad_norm == pytest.approx(oracle.result.grad_norm, rel=1e-6)
        assert largest_difference(outcome.gradients, oracle.gradients) < 1e-6
        assert largest_difference(outcome.weights, oracle.weights) < 1e-6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_skips_the_step_on_both(two: Ranks, strategy: str) -> None:
    def poisoned() -> tuple[StepResult, float, bool]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        ill = dist.get_rank() == 1
        outcome = on_rank(strategy, 4, poison=ill, scaler=scaler)
        fresh = dict(Llama(MODEL).named_parameters())
        same = all(torch.equal(fresh[name], w) for name, w in outcome.weights.items())
        return outcome.result, scaler.get_scale(), same

    for result, scale, same in two.run(poisoned, deadline_s=30):
        assert result.skipped
        assert result.nonfinite_ranks == (1,)
        assert scale == 32  # backed off on both
        assert same


def test_ranks_drop_different_outputs(two: Ranks) -> None:
    config = TrainConfig(dropout=0.5)

    def losses() -> list[float]:
        return [step_on("ddp", [batch_of([17])], config=config).result.loss for _ in range(2)]

    alone = step_on("one", [batch_of([17])], config=config).result.loss
    ranks = two.run(losses)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ranks[0][1]
    assert ranks[0][0] != alone  # rank 1 has the same tokens and another mask
