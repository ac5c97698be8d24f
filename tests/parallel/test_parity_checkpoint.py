"""Whatever a run was split over, rank 0 keeps what one process would: weights and moments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from labsupport import Ranks
from labsupport.checkpoint import full_optimizer_state_dict, full_state_dict
from labsupport.config import ParallelConfig
from labsupport.parallel.layout import Layout
from labsupport.train import build_optimizer, train_step
from labsupport.train.assemble import distribute
from labsupport.train.precision import Precision
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, build, proof_batches

State = tuple[dict[str, Tensor], dict[str, Any]]


def trained(
    layout: Layout, parallel: ParallelConfig, split: Callable[..., Any] | None = None
) -> State:
    """What is kept of two steps on global batches of four data-parallel ranks."""
    plain = build(PROOF_MODEL, PROOF_CONFIG, seed=0)
    spread = partial(distribute, plain, parallel, precision=Precision.named("fp32"))
    model = spread(layout=layout) if split is None else split(plain, layout.mesh)
    optimizer = build_optimizer(model, PROOF_CONFIG)
    for step in range(2):
        batches = proof_batches(step, config=PROOF_CONFIG, world_size=4)
        size = len(batches) // layout.dp_size
        mine = batches[layout.dp_rank * size :][:size]
        train_step(model, optimizer, mine, config=PROOF_CONFIG, step=step, layout=layout)
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def on_rank(parallel: ParallelConfig, split: Callable[..., Any] | None = None) -> State:
    return trained(Layout.build(parallel), parallel, split)


@lru_cache
def alone() -> State:
    torch.set_num_threads(1)
    return trained(Layout(), ParallelConfig())


def check(ranks: Ranks, parallel: ParallelConfig, split: Callable[..., Any] | None = None) -> None:
    (weights, kept), *others = ranks.run(on_rank, parallel, split)
    assert others == [({}, {})] * (ranks.world_size - 1)
    right_weights, right = alone()
    assert list(weights) == list(right_weights)
    assert all(far(weights[name], right_weights[name]) < 1e-5 for name in weights)
    assert kept["param_groups"] == right["param_groups"]
    assert kept["state"].keys() == right["state"].keys()
    for name, state in right["state"].items():
        assert kept["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert type(kept["state"][name][key]) is Tensor
            assert far(kept["state"][name][key], value) < 1e-5


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel_sharding": "zero1"},
        {"data_parallel_size": 2, "data_parallel_sharding": "zero2"},
        {"data_parallel_size": 2, "data_parallel_sharding": "fsdp"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
    ],
    ids=str,
)
def test_two_ranks(two: Ranks, sizes: dict[str, Any]) -> None:
    check(two, ParallelConfig(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {
            "data_parallel_size": 4,
            "data_parallel_sharding": "hsdp",
            "data_parallel_replicate_size": 2,
        },
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
        {
            "data_parallel_size": 2,
            "data_parallel_sharding": "fsdp",
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
        },
        {"tensor_parallel_size": 4},  # copies of key-value heads
    ],
    ids=str,
)
def test_four_ranks(four: Ranks, sizes: dict[str, Any]) -> None:
    check(four, ParallelConfig(**sizes))


def feed_forward_only(model: Any, mesh: Any) -> Any:
    """A plan of one's own: matrices that are split beside others that are plain tensors."""
    plan = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    return parallelize_module(
        model, mesh["tp"], {f"model.layers.*.mlp.{name}": style for name, style in plan.items()}
    )


def test_split_weights_beside_plain_ones(two: Ranks) -> None:
    """The optimizer has groups for each kind; what is kept does not show it."""
    check(two, ParallelConfig(tensor_parallel_size=2), feed_forward_only)


def test_torch_s_advice_on_two_all_gathers_is_not_shown(
    four: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = ParallelConfig(
        data_parallel_size=2, data_parallel_sharding="fsdp", tensor_parallel_size=2
    )
    four.run(lambda: full_state_dict(ready(parallel)))
    out, err = capsys.readouterr()
    assert "suboptimal" not in out + err


def ready(parallel: ParallelConfig) -> torch.nn.Module:
    plain = build(PROOF_MODEL, PROOF_CONFIG, seed=dist.get_rank())
    layout = Layout.build(parallel)
    return distribute(plain, parallel, layout=layout, precision=Precision.named("fp32"))
