"""64 ranks on paper: the recipes as they are, on the backend that sends nothing.

Weights are on the meta device (our ZeRO, which starts from values, gets real ones). What a rank
then holds, parameter by parameter and in bytes with gradients and Adam's moments, is what the
planner says, for ranks from both ends and the middle. The model is chosen to divide badly: some
parameters have fewer rows than there are ranks, and the last ranks hold less or nothing of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig, check_fits
from labsupport.model import Llama
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import tensor_parallel_by_hand
from labsupport.parallel.zero import zero3
from labsupport.plan.parameter_shapes import ParameterShape, shapes_of
from labsupport.plan.sharding import HeldByRank, shard
from labsupport.plan.tensor_parallel import local_shapes
from labsupport.train import assemble, build_optimizer
from labsupport.train.assemble import distribute
from labsupport.train.precision import Precision

MODEL = ModelConfig(
    vocab_size=2050,
    hidden_size=96,
    intermediate_size=200,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
)
RANKS = (0, 1, 31, 47, 48, 63)
P = ParallelConfig
CASES = {
    "ddp": P(data_parallel_size=64),
    "zero1": P(data_parallel_size=64, data_parallel_sharding="zero1"),
    "zero2": P(data_parallel_size=64, data_parallel_sharding="zero2"),
    "zero3 by hand": P(data_parallel_size=64, data_parallel_sharding="fsdp"),
    "fsdp": P(data_parallel_size=64, data_parallel_sharding="fsdp"),
    "hsdp": P(data_parallel_size=64, data_parallel_sharding="hsdp", data_parallel_replicate_size=4),
    "cp": P(context_parallel_size=64),
    "fsdp × cp": P(data_parallel_size=16, data_parallel_sharding="fsdp", context_parallel_size=4),
    "ddp × tp": P(data_parallel_size=16, tensor_parallel_size=4),
    "tp by hand, shared heads": P(data_parallel_size=8, tensor_parallel_size=8),
    "fsdp × tp": P(data_parallel_size=16, data_parallel_sharding="fsdp", tensor_parallel_size=4),
    "fsdp × tp + sp": P(
        data_parallel_size=16,
        data_parallel_sharding="fsdp",
        tensor_parallel_size=4,
        sequence_parallel=True,
    ),
    "hsdp × tp × cp": P(
        data_parallel_size=4,
        data_parallel_sharding="hsdp",
        data_parallel_replicate_size=2,
        tensor_parallel_size=8,
        context_parallel_size=2,
    ),
}


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of many, none of which is there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_rank(name: str, rank: int) -> tuple[Layout, dict[str, int], dict[str, int]]:
    """Its place; the numbers it holds of each parameter; bytes with gradients and moments."""
    parallel = CASES[name]
    with fake_group(rank, parallel.world_size):
        layout = Layout.build(parallel)
        has_values = "zero" in name or parallel.data_parallel_sharding == "ddp"
        with nullcontext() if has_values else torch.device("meta"):
            model = Llama(MODEL)
        if name == "zero3 by hand":
            zero3(model, layout.loss_mesh)
        elif name.startswith("tp by hand"):
            tensor_parallel_by_hand(model, layout.mesh["tp"])
        else:
            with pytest.MonkeyPatch.context() as patch:
                # Shapes are enough, and torch's caches remember the place of an earlier rank.
                patch.setattr(assemble, "init_shards", lambda model, seed: model)
                model = distribute(
                    model, parallel, layout=layout, precision=Precision.named("fp32")
                )
        params = dict(getattr(model, "module", model).named_parameters())
        for param in params.values():
            param.grad = torch.zeros_like(param)
        optimizer = build_optimizer(model, TrainConfig())
        optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values()]
        held = {name: local(param).numel() for name, param in params.items()}
        num_bytes = {
            "parameters": sum(size_bytes(param) for param in params.values()),
            "gradients": sum(size_bytes(param.grad) for param in params.values()),
            "optimizer": sum(map(size_bytes, states)),
        }
        return replace(layout, mesh=None, group=None, loss_group=None), held, num_bytes


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_bytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def planned(name: str, layout: Layout) -> tuple[dict[str, int], HeldByRank]:
    """The planner's numbers for this place: first the layers are split, then their shards cut."""
    parallel = CASES[name]
    shapes = shapes_of(MODEL)
    if layout.tp_size > 1:
        sizes = local_shapes(MODEL, tensor_parallel_size=layout.tp_size, rank=layout.tp_rank)
        shapes = tuple(replace(shape, shape=sizes[shape.name]) for shape in shapes)
    stage = "zero3" if name == "zero3 by hand" else parallel.data_parallel_sharding
    divided = stage != "ddp"
    cut_over = parallel.mesh["dp_shard"] * (layout.cp_size if divided else 1)
    copies = parallel.mesh["dp_replicate"] if stage == "hsdp" else 1
    place = (layout.dp_rank * layout.cp_size + layout.cp_rank) if divided else 0
    plan = shard(shapes, stage=stage, world_size=cut_over * copies, replicate_size=copies)
    return {shape.name: numel_of(shape, stage, place % cut_over, cut_over) for shape in shapes}, (
        plan.held[place]
    )


def numel_of(shape: ParameterShape, stage: str, rank: int, num_ranks: int) -> int:
    is_whole = stage == "ddp" or (stage.startswith("zero") and shape.shape[0] < num_ranks)
    return prod(shape.shape) if is_whole else shape.numel_of_rank(rank, num_ranks)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_is_planned(name: str, rank: int) -> None:
    check_fits(MODEL, CASES[name], seq_len=1024)
    layout, held, num_bytes = on_rank(name, rank)
    assert layout.rank == rank
    shards, plan = planned(name, layout)
    assert held == shards
    assert num_bytes["optimizer"] == plan.optimizer_bytes
    if name not in ("zero1", "zero2"):  # whose whole weights and gradients are no parameters
        assert num_bytes["parameters"] == plan.parameters_bytes
        assert num_bytes["gradients"] == plan.gradients_bytes


def test_the_last_ranks_may_hold_nothing_of_a_parameter() -> None:
    """96 rows are 2 each for 48 of 64 ranks. By hand, 48 rows are too few: all ranks hold all."""
    _, first, _ = on_rank("fsdp", 47)
    _, last, _ = on_rank("fsdp", 48)
    _, by_hand, _ = on_rank("zero3 by hand", 63)
    name, small = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    assert (first[name], last[name], by_hand[name]) == (2 * 96, 0, 0)
    assert (first[small], last[small], by_hand[small]) == (96, 0, 48 * 96)
