"""Sharding on paper: worked by hand, split as torch.chunk does, and as real shards are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from labsupport import Ranks
from labsupport.config import ModelConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.zero import zero1, zero2, zero3
from labsupport.plan.links import Road
from labsupport.plan.parameter_shapes import ParameterShape, shapes_of
from labsupport.plan.sharding import STAGES, ShardingPlan, shard

# 10 rows of 3 over 4 ranks: 3, 3, 3, 1 rows. A frozen block of 8. A vector with fewer rows.
ODD = (
    ParameterShape(name="matrix", shape=(10, 3)),
    ParameterShape(name="block", shape=(4, 2), trained=False, unit="block"),
    ParameterShape(name="small", shape=(2,)),
)
EVEN = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2
)
UNEVEN = replace(EVEN, vocab_size=66)


@pytest.mark.parametrize("name", ["tiny", "125m", "1b", "llama-3.1-8b"])
def test_shapes_are_those_of_the_model(name: str) -> None:
    config = ModelConfig.named(name)
    with torch.device("meta"):
        model = Llama(config)
    real = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    assert [(shape.name, shape.shape) for shape in shapes_of(config)] == real
    for blocks in (1, 2, 3):
        starts = range(0, config.num_layers, blocks)
        units = {shape.unit for shape in shapes_of(config, blocks_per_unit=blocks)}
        assert units == {"", *(f"model.layers.{i}" for i in starts)}


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 10, 63, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7, 64])
def test_rows_are_split_as_torch_does(rows: int, num_ranks: int) -> None:
    chunks = list(torch.empty(rows, 3).chunk(num_ranks))
    real = [chunk.numel() for chunk in chunks] + [0] * (num_ranks - len(chunks))
    shape = ParameterShape(name="", shape=(rows, 3))
    assert [shape.numel_of_rank(rank, num_ranks) for rank in range(num_ranks)] == real
    assert shape.padded_numel(num_ranks) == num_ranks * real[0]


def test_held_by_hand() -> None:
    def held(stage: Any, **kwargs: Any) -> list[tuple[int, ...]]:
        plan = shard(ODD, stage=stage, world_size=4, **kwargs)
        return [tuple(one.bytes_of.values()) for one in plan.held]

    whole, trained = 4 * (30 + 8 + 2), 4 * (30 + 2)
    assert held("ddp") == [(whole, trained, 2 * trained + 8, 0)] * 4
    mine = [4 * (9 + 2)] * 3 + [4 * (3 + 2)]  # the small one is whole everywhere
    assert held("zero1") == [(whole, trained, 2 * m + 8, 0) for m in mine]
    assert held("zero2") == [(whole, m, 2 * m + 8, 0) for m in mine]
    assert held("zero3") == [(m + 4 * 2, m, 2 * m + 8, 0) for m in mine]  # 2 of the frozen 8
    narrow = 2 * (30 + 8 + 2)  # whole weights in bf16 beside the shards in fp32
    own = [m + 4 * 2 for m in mine]
    assert held("zero2", precision="bf16") == [
        (o, m, 2 * m + 8, narrow) for o, m in zip(own, mine, strict=True)
    ]
    by_torch = [4 * n for n in (9 + 1, 9 + 1, 9, 3)]  # two ranks have nothing of the small one
    assert held("fsdp") == [(m + 4 * 2, m, 2 * m + 8, 0) for m in by_torch]
    plan = shard(ODD, stage="fsdp", world_size=4)
    assert plan.fullest == max(plan.held, key=lambda one: one.total_bytes)
    assert held("zero1", optimizer="sgd") == [(whole, trained, m, 0) for m in mine]
    assert held("ddp", optimizer="sgd", momentum=0.0) == [(whole, trained, 0, 0)] * 4
    pure = held("fsdp", precision="bf16-pure")
    assert pure == [(m // 2 + 4, m // 2, m + 8, 0) for m in by_torch]


def test_hsdp_holds_a_copy_in_each_group() -> None:
    plan = shard(ODD, stage="hsdp", world_size=4, replicate_size=2)
    pair = shard(ODD, stage="fsdp", world_size=2)
    assert plan.held == pair.held * 2
    assert plan.exchanged_bytes == {
        "reduce_scatter": pair.exchanged_bytes["reduce_scatter"],
        "all_reduce": pair.exchanged_bytes["reduce_scatter"] // 2,
        "all_gather": pair.exchanged_bytes["all_gather"],
    }


def test_exchanges_by_hand() -> None:
    def sent(stage: Any, **kwargs: Any) -> dict[str, int]:
        return dict(shard(ODD, stage=stage, world_size=4, **kwargs).exchanged_bytes)

    assert sent("ddp") == {"all_reduce": 128}
    once = {"all_reduce": 8, "reduce_scatter": 4 * 36, "all_gather": 4 * 36}  # 12 rows of 3
    assert sent("zero1") == sent("zero2") == once
    assert sent("zero3")["all_gather"] == 4 * (36 + 8 + 8)  # the frozen block is gathered twice
    assert sent("zero3", reshard_after_forward=False)["all_gather"] == 4 * (36 + 8)
    assert sent("zero3", gradient_accumulation_steps=3)["all_gather"] == 3 * 4 * (36 + 8 + 8)
    assert sent("zero3", gradient_accumulation_steps=3)["reduce_scatter"] == 4 * 36
    assert sent("zero3", precision="bf16")["all_gather"] == 2 * (36 + 8 + 8)
    assert sent("fsdp") == {"reduce_scatter": 4 * 40, "all_gather": 4 * (40 + 8 + 8)}
    for stage in STAGES:
        assert shard(ODD, stage=stage, world_size=1).exchanged_bytes == {}


def test_one_one_and_one_and_a_half_of_ddp() -> None:
    shapes = shapes_of(ModelConfig.named("llama-3.1-8b"))
    plans = {stage: shard(shapes, stage=stage, world_size=8) for stage in STAGES}
    ddp = plans["ddp"].link_bytes
    assert plans["zero1"].link_bytes == plans["zero2"].link_bytes == ddp
    assert plans["zero3"].link_bytes == plans["fsdp"].link_bytes
    assert plans["zero3"].link_bytes / ddp == pytest.approx(1.43, abs=0.01)  # the root goes once
    assert ddp == 2 * 7 / 8 * 4 * ModelConfig.named("llama-3.1-8b").num_params


def test_time_on_a_link() -> None:
    rope = Road(name="rope", latency_s=0.5, bandwidth_bytes_per_s=100.0, basis="made up")
    plan = shard(ODD, stage="ddp", world_size=2)
    assert plan.time_s(rope) == pytest.approx(2 * 0.5 + 128 / 100)  # 2 steps, S bytes


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of ddp, zero1"):
        shard(ODD, stage="zero4", world_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose one of fp32"):
        shard(ODD, stage="ddp", world_size=2, precision="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        shard(ODD, stage="ddp", world_size=0)
    with pytest.raises(ValueError, match="must divide"):
        shard(ODD, stage="hsdp", world_size=8, replicate_size=3)
    with pytest.raises(ValueError, match=r"must be in 1…3"):
        shapes_of(UNEVEN, blocks_per_unit=4)
    with pytest.raises(ValueError, match="hsdp only"):
        shard(ODD, stage="fsdp", world_size=8, replicate_size=2)


# ---- against real shards -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, threads_per_rank=1) as pool:
        yield pool


Wrap = Callable[[Llama], torch.nn.Module]


def _step(wrap: Wrap, config: ModelConfig, bytes_of: Callable[[Any], int]) -> tuple[Any, ...]:
    """Bytes held after the second step's backward pass and update, and what the step exchanged."""
    model = wrap(Llama(config))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(config.vocab_size, (2, 8))
    for _ in range(2):
        with count_collective_bytes() as counted:
            model(ids).float().square().mean().backward()
        held = [bytes_of(model.parameters()), bytes_of(p.grad for p in model.parameters())]
        optimizer.step()
        held.append(bytes_of(t for state in optimizer.state.values() for t in state.values()))
        optimizer.zero_grad()
    names = {"allgather": "all_gather", "allreduce": "all_reduce"}
    sent = {names.get(name, name): sum(sizes) for name, sizes in counted.sizes_bytes.items()}
    return held, sent


def _numbers(tensors: Any) -> int:
    """Of this rank's rows."""
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def _memory(tensors: Any) -> int:
    """Behind this rank's rows: all of a whole tensor of which they are a part, and padding."""
    memory = {s._cdata: s.nbytes() for s in (_local(t).untyped_storage() for t in tensors)}
    return sum(memory.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _agrees(
    ranks: Ranks, plan: ShardingPlan, wrap: Wrap, config: ModelConfig, bytes_of: Any
) -> None:
    for (held, sent), one in zip(ranks.run(_step, wrap, config, bytes_of), plan.held, strict=True):
        assert held == [one.parameters_bytes, one.gradients_bytes, one.optimizer_bytes]
        flags = sent.pop("all_reduce", 0) - plan.exchanged_bytes.get("all_reduce", 0)
        assert flags in (0, len(shapes_of(config)))  # ours tell which parameters were used
        rest = {name: size for name, size in plan.exchanged_bytes.items() if name != "all_reduce"}
        assert sent == rest


def test_fully_shard_holds_and_sends_what_the_plan_says(four: Ranks) -> None:
    def agrees(wrap: Wrap, *, blocks: int = 1, stage: Any = "fsdp", **settings: Any) -> None:
        shapes = shapes_of(UNEVEN, blocks_per_unit=blocks)  # 66 rows: 17, 17, 17, 15
        plan = shard(shapes, stage=stage, world_size=4, **settings)
        _agrees(four, plan, wrap, UNEVEN, _numbers)

    agrees(fully_sharded)
    agrees(lambda m: fully_sharded(m, compute_dtype=torch.bfloat16), precision="bf16")
    keep = {"reshard_after_forward": False}
    agrees(lambda m: fully_sharded(m, **keep), **keep)
    agrees(lambda m: fully_sharded(m, blocks_per_unit=2), blocks=2)
    agrees(lambda m: fully_sharded(m, mesh=_two_by_two()), stage="hsdp", replicate_size=2)


@pytest.mark.parametrize(("stage", "wrap"), [("zero1", zero1), ("zero2", zero2), ("zero3", zero3)])
def test_ours_hold_and_send_what_the_plan_says(four: Ranks, stage: Any, wrap: Wrap) -> None:
    plan = shard(shapes_of(EVEN), stage=stage, world_size=4)
    _agrees(four, plan, wrap, EVEN, _memory)
    # 66 rows are 17, 17, 17 and 15, of the gradients that zero2 and zero3 keep, and of the moments.
    held = [held for held, _ in four.run(_step, wrap, UNEVEN, _numbers)]
    plan = shard(shapes_of(UNEVEN), stage=stage, world_size=4)
    assert [moments for *_, moments in held] == [one.optimizer_bytes for one in plan.held]


def _two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
