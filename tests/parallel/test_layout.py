"""Where a rank stands: who shares a batch, a sequence, a mask of dropout, and a verdict on NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from labsupport import Ranks
from labsupport.config import ParallelConfig
from labsupport.model import Llama
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import tensor_parallel_by_hand
from labsupport.train import StepResult, build_optimizer, train_step
from labsupport.train.assemble import distribute
from labsupport.train.precision import Precision
from labsupport.train.proof import prove_equal
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    build,
    proof_batches,
    whole_tensors,
)

DP = ParallelConfig(data_parallel_size=2)
FSDP = ParallelConfig(data_parallel_size=2, data_parallel_sharding="fsdp")
TP = ParallelConfig(tensor_parallel_size=2)
SP = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
CP = ParallelConfig(context_parallel_size=2)


def place(parallel: ParallelConfig) -> tuple[Any, ...]:
    layout = Layout.build(parallel)
    assert layout.rank == dist.get_rank()
    assert layout.world_size == dist.get_world_size()
    averaged = dist.get_process_group_ranks(layout.loss_group)
    where = (layout.dp_rank, layout.cp_rank, layout.tp_rank, layout.activation_rank)
    shape = tuple(layout.fsdp_mesh.shape), tuple(layout.ddp_mesh.shape)
    return where, averaged, shape, layout.shard_sequence(torch.arange(8)).tolist()


def test_places_on_four_ranks(four: Ranks) -> None:
    tp = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    assert four.run(place, tp) == [
        ((0, 0, 0, 0), [0, 2], ((2, 1), (2, 1)), [*range(8)]),
        ((0, 0, 1, 0), [1, 3], ((2, 1), (2, 1)), [*range(8)]),
        ((1, 0, 0, 1), [0, 2], ((2, 1), (2, 1)), [*range(8)]),
        ((1, 0, 1, 1), [1, 3], ((2, 1), (2, 1)), [*range(8)]),
    ]
    hybrid = {"data_parallel_sharding": "hsdp", "data_parallel_replicate_size": 2}
    cp = ParallelConfig(data_parallel_size=2, context_parallel_size=2, **hybrid)
    assert four.run(place, cp) == [
        ((0, 0, 0, 0), [0, 1, 2, 3], ((2, 2), (4, 1)), [0, 1, 6, 7]),
        ((0, 1, 0, 1), [0, 1, 2, 3], ((2, 2), (4, 1)), [2, 3, 4, 5]),
        ((1, 0, 0, 2), [0, 1, 2, 3], ((2, 2), (4, 1)), [0, 1, 6, 7]),
        ((1, 1, 0, 3), [0, 1, 2, 3], ((2, 2), (4, 1)), [2, 3, 4, 5]),
    ]
    both = ParallelConfig(
        tensor_parallel_size=2, context_parallel_size=2, sequence_parallel=True,
        data_parallel_sharding="fsdp",
    )  # fmt: skip
    assert [row[:3] for row in four.run(place, both)] == [
        ((0, 0, 0, 0), [0, 2], ((2,), (2, 1))),
        ((0, 0, 1, 1), [1, 3], ((2,), (2, 1))),
        ((0, 1, 0, 2), [0, 2], ((2,), (2, 1))),
        ((0, 1, 1, 3), [1, 3], ((2,), (2, 1))),
    ]


def test_a_layout_for_another_number_of_ranks_is_refused(two: Ranks) -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match="4 ranks are laid out, but 2 are there") as caught:
            Layout.build(ParallelConfig(data_parallel_size=4))
        return str(caught.value)

    assert "ParallelConfig.for_world_size(2, …)" in two.run(refused)[0]


def fails_in_the_loss() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
    with pytest.raises(KeyError), Layout.build(TP).loss_context():
        raise KeyError("out of memory, say")
    with pytest.raises(RuntimeError) as caught:  # not torch's parallel loss any more
        cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    return str(caught.value)


def test_an_error_in_the_loss_leaves_torch_as_it_was(two: Ranks) -> None:
    assert all("mixed torch.Tensor and DTensor" in text for text in two.run(fails_in_the_loss))


def test_one_tensor_parallel_rank_is_a_model_like_another(two: Ranks) -> None:
    def wrap(model: Llama, layout: Layout) -> Any:
        assert layout.mesh is not None
        split = tensor_parallel_by_hand(model, layout.mesh["tp"])
        return fully_sharded(split, mesh=layout.fsdp_mesh)

    assert prove_equal(two, wrap, parallel=FSDP, steps=1).is_equal


# ---- one step on two ranks ---------------------------------------------------------------------


def ready(parallel: ParallelConfig, *, dropout: float = 0.0) -> tuple[Layout, Any, Any, Any]:
    config = replace(PROOF_CONFIG, dropout=dropout)
    layout = Layout.build(parallel)
    plain = build(PROOF_MODEL, config, seed=0)
    model = distribute(plain, parallel, layout=layout, precision=Precision.named("fp32"))
    return layout, plain, model, config


def step(layout: Layout, model: Any, config: Any) -> StepResult:
    k = config.gradient_accumulation_steps
    batches = proof_batches(0, config=config, world_size=layout.dp_size)
    mine = batches[layout.dp_rank * k :][:k]
    optimizer = build_optimizer(model, config)
    return train_step(model, optimizer, mine, config=config, step=0, layout=layout)


def masks(parallel: ParallelConfig) -> list[Tensor]:
    """Where dropout put zeros, in the order of the calls."""
    seen: list[Tensor] = []
    layout, plain, model, config = ready(parallel, dropout=0.5)
    for block in plain.model.layers:
        block.dropout.register_forward_hook(lambda *call: seen.append(call[-1] == 0))
    model.train()
    step(layout, model, config)
    return seen


@pytest.mark.parametrize(
    ("parallel", "shared"), [(DP, False), (FSDP, False), (TP, True), (SP, False), (CP, False)]
)
def test_dropout_is_shared_where_activations_are(
    two: Ranks, parallel: ParallelConfig, *, shared: bool
) -> None:
    first, second = two.run(masks, parallel)
    assert len(first) == 2 * 2 * PROOF_CONFIG.gradient_accumulation_steps
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert all(same) if shared else not any(same)
    assert 0.4 < torch.cat([mask.flatten() for mask in first]).float().mean() < 0.6
    again, _ = two.run(masks, parallel)
    assert all(map(torch.equal, first, again))


def poisoned(parallel: ParallelConfig, what: str) -> tuple[StepResult, bool]:
    """A step in which rank 1 alone computes NaN: in its logits, or in the gradient of a norm."""
    layout, plain, model, config = ready(parallel)
    before = whole_tensors(model, "data")
    if dist.get_rank() == 1 and what == "logits":
        plain.lm_head.register_forward_hook(lambda *call: call[-1] * math.nan)
    if dist.get_rank() == 1 and what == "gradient":
        weight = dict(plain.named_parameters())["model.norm.weight"]
        weight.register_hook(lambda gradient: gradient * math.nan)
    result = step(layout, model, config)
    after = whole_tensors(model, "data")
    return result, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("parallel", "ranks"), [(DP, (1,)), (FSDP, (1,)), (TP, (0, 1)), (SP, (0, 1)), (CP, (1,))]
)
def test_a_nan_on_one_rank_skips_the_step_on_all(
    two: Ranks, parallel: ParallelConfig, ranks: tuple[int, ...]
) -> None:
    """Case T15. Tensor-parallel ranks share the loss, so both are named."""
    for result, is_unchanged in two.run(poisoned, parallel, "logits", deadline_s=60):
        assert result.skipped
        assert result.nonfinite_ranks == ranks
        assert is_unchanged


def test_a_nan_in_one_rank_s_copy_of_a_gradient_skips_it_too(two: Ranks) -> None:
    for result, is_unchanged in two.run(poisoned, TP, "gradient", deadline_s=60):
        assert result.skipped
        assert result.nonfinite_ranks == ()
        assert is_unchanged
