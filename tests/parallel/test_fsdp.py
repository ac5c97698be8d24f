"""Fully sharded: equal to one process on 1, 2 and 4 ranks; bytes held and sent are the plan's.

In bf16 the whole block computes narrow, not only its matrix products as under autocast. Its oracle
is therefore the same on a mesh of one rank, and autocast in one process only to bf16's precision.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from labsupport import RankError, Ranks
from labsupport.config import ModelConfig, ParallelConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.measure.memory import MemoryTracker
from labsupport.model import Llama
from labsupport.parallel import fsdp
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import tensor_parallel, tensor_parallel_by_hand
from labsupport.plan.parameter_shapes import shapes_of
from labsupport.plan.sharding import ShardingPlan, shard
from labsupport.train.optimizer import build_optimizer
from labsupport.train.proof import RankProof, prove_equal, prove_on_rank
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, proof_batches
from labsupport.train.step import train_step

TIED = replace(PROOF_MODEL, tie_word_embeddings=True)
UNEVEN = replace(PROOF_MODEL, vocab_size=67, intermediate_size=47, num_layers=3)
TOKENS = torch.arange(16).view(2, 8)

FACTORS = [
    ("fp32", "autocast", "narrow"),
    ("none", "full", "selective"),
    ("reshards", "keeps"),
    ("untied", "tied"),
    (1, 2),  # micro batches
    (1, 2),  # blocks of a unit
]
CELLS = [
    ("fp32", "none", "reshards", "tied", 2, 2),
    ("fp32", "full", "reshards", "untied", 1, 1),
    ("fp32", "selective", "keeps", "untied", 2, 2),
    ("autocast", "none", "keeps", "tied", 1, 1),
    ("autocast", "full", "reshards", "untied", 1, 2),
    ("autocast", "selective", "reshards", "untied", 2, 2),
    ("narrow", "none", "reshards", "untied", 1, 2),
    ("narrow", "full", "keeps", "tied", 2, 1),
    ("narrow", "selective", "keeps", "tied", 1, 1),
]


def sharded_alone(model: Llama, **options: Any) -> Any:
    """The same recipe on a mesh of this rank only."""
    shape = (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_sharded(model, mesh=mesh["dp_shard"], **options)


def prove_cell(
    precision: str, recompute: str, after_forward: str, tied: str, accumulation: int, unit: int
) -> RankProof:
    """On a rank."""
    config = replace(
        PROOF_CONFIG,
        mixed_precision="fp32" if precision == "fp32" else "bf16",
        activation_checkpointing=recompute,
        gradient_accumulation_steps=accumulation,
    )
    options: dict[str, Any] = {
        "compute_dtype": torch.bfloat16 if precision == "narrow" else None,
        "reshard_after_forward": after_forward == "reshards",
        "blocks_per_unit": unit,
    }
    return prove_on_rank(
        partial(fully_sharded, **options),
        wrap_alone=partial(sharded_alone, **options) if precision == "narrow" else None,
        model=TIED if tied == "tied" else PROOF_MODEL,
        config=config,
    )


@pytest.mark.parametrize("cell", CELLS)
def test_two_ranks(two: Ranks, cell: tuple[Any, ...]) -> None:
    proofs = two.run(prove_cell, *cell)
    assert all(proof.is_equal for proof in proofs), proofs


def test_the_cells_hold_every_pair_of_settings() -> None:
    for i, j in combinations(range(len(FACTORS)), 2):
        assert {(cell[i], cell[j]) for cell in CELLS} == set(product(FACTORS[i], FACTORS[j]))


def test_narrow_is_autocast_to_the_precision_of_bf16(two: Ranks) -> None:
    config = replace(PROOF_CONFIG, mixed_precision="bf16")
    narrow = partial(fully_sharded, compute_dtype=torch.bfloat16)
    assert prove_equal(two, narrow, config=config, tolerance=0.05).is_equal


def test_one_rank() -> None:
    with Ranks(1, device="cpu", threads_per_rank=1) as one:
        for cell in (CELLS[0], CELLS[7]):
            (proof,) = one.run(prove_cell, *cell)
            assert proof.is_equal, proof


def test_four_ranks_of_which_some_hold_fewer_rows(four: Ranks) -> None:
    assert prove_equal(four, fully_sharded, model=UNEVEN).is_equal


@pytest.mark.parametrize("split", [tensor_parallel, tensor_parallel_by_hand])
def test_a_model_that_is_tensor_parallel_already(four: Ranks, split: Any) -> None:
    def wrap(model: Llama, layout: Layout) -> Any:
        assert layout.mesh is not None
        return fully_sharded(split(model, layout.mesh["tp"]), mesh=layout.fsdp_mesh)

    sizes = ParallelConfig(
        data_parallel_size=2, data_parallel_sharding="fsdp", tensor_parallel_size=2
    )
    proof = prove_equal(four, wrap, parallel=sizes, model=TIED)
    assert proof.is_equal, proof


@pytest.mark.parametrize("reshards", [True, False])
def test_a_look_before_the_update_and_a_module_of_any_class(two: Ranks, reshards: bool) -> None:
    """Whole weights of an evaluation do not outlive the update that follows."""

    def on_rank() -> float:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        model = fully_sharded(copy.deepcopy(plain), reshard_after_forward=reshards)
        nets = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (plain, model)]
        for net, optimizer in nets:
            for _ in range(3):
                net(torch.ones(2, 6)).square().sum().backward()
                with torch.no_grad():
                    net(torch.ones(1, 6))
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        whole = zip(model.parameters(), plain.parameters(), strict=True)
        return max((a.full_tensor() - b).abs().max().item() for a, b in whole)

    assert max(two.run(on_rank)) < 1e-6


# ---- bytes -------------------------------------------------------------------------------------


def counted_step(model: ModelConfig, **options: Any) -> dict[str, Any]:
    """On a rank: what it holds, sends and gathers in the second of two steps."""
    sharded = fully_sharded(Llama(model), **options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    with MemoryTracker(sharded, optimizer) as memory:
        for _ in range(2):
            with count_collective_bytes() as counted:
                sharded(TOKENS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    sizes = counted.sizes_bytes
    timeline = memory.timeline()
    held = {name: size for name, size in timeline.at("backward", step=2).bytes_of.items() if size}
    return {
        "calls": {name: len(each) for name, each in sizes.items()},
        "all_gather": sum(sizes["allgather"]),
        "reduce_scatter": sum(sizes["reduce_scatter"]),
        "held": held,
        "gathered": timeline.largest("gathered", step=2),
    }


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("model", [PROOF_MODEL, TIED, UNEVEN], ids=["even", "tied", "uneven"])
def test_bytes_are_those_of_the_plan(two: Ranks, model: ModelConfig, reshards: bool) -> None:
    plan: ShardingPlan = shard(
        shapes_of(model), stage="fsdp", world_size=2, reshard_after_forward=reshards
    )
    found = two.run(counted_step, model, reshard_after_forward=reshards)
    for rank, one in enumerate(found):
        assert one["all_gather"] == plan.exchanged_bytes["all_gather"]
        assert one["reduce_scatter"] == plan.exchanged_bytes["reduce_scatter"]
        if model is UNEVEN:  # torch keeps whole weights and shards with their rows of padding
            share = sum(shape.padded_numel(2) for shape in shapes_of(model)) // 2 * 4
            assert one["held"]["parameters"] == one["held"]["gradients"] == share
            assert one["gathered"] >= plan.gathered_bytes
        else:
            held = plan.held[rank].bytes_of
            for name in ("parameters", "gradients", "optimizer"):
                assert one["held"][name] == held[name]
            assert one["gathered"] == plan.gathered_bytes


def test_larger_units_send_fewer_messages_and_hold_more(two: Ranks) -> None:
    deep = replace(PROOF_MODEL, num_layers=6)
    root = 2 * deep.vocab_size * deep.hidden_size * 4 + deep.hidden_size * 4
    block = (deep.num_params * 4 - root) // deep.num_layers
    for unit in (1, 2, 3, 6):
        one = two.run(counted_step, deep, blocks_per_unit=unit)[0]
        units = deep.num_layers // unit
        assert one["calls"]["allgather"] == 1 + 2 * units
        assert one["gathered"] == root + unit * block
        assert one["reduce_scatter"] == deep.num_params * 4


def test_a_saw_tooth(two: Ranks) -> None:
    """A block is gathered, used, freed: the next comes when the last has gone."""

    def on_rank() -> list[int]:
        model = fully_sharded(Llama(UNEVEN))
        optimizer = torch.optim.SGD(model.parameters())
        with MemoryTracker(model, optimizer) as memory:
            for _ in range(2):
                model(TOKENS).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        samples = [s for s in memory.timeline().samples if s.step == 2]
        return [s.bytes_of["gathered"] for s in samples if s.phase in ("forward", "backward")]

    root = (2 * 68 * 32 + 32) * 4  # with a row of padding
    block = (32 * 32 * 2 + 16 * 32 * 2 + 48 * 32 * 2 + 32 * 47 + 2 * 32) * 4
    for gathered in two.run(on_rank):
        changes = [b for a, b in pairwise(gathered) if a != b]
        around = zip(changes, changes[1:], changes[2:], strict=False)
        turns = [b for a, b, c in around if (b - a) * (c - b) < 0]
        teeth = [root + block, root] * 6
        assert turns == teeth[:-1]  # the last fall goes on: the root is freed too
        assert gathered[0] == gathered[-1] == 0


# ---- refused -----------------------------------------------------------------------------------


def test_an_optimizer_built_too_early_is_refused(two: Ranks) -> None:
    def on_rank() -> None:
        model = Llama(PROOF_MODEL)
        optimizer = build_optimizer(model, PROOF_CONFIG)
        fully_sharded(model)
        batches = proof_batches(0, config=PROOF_CONFIG, world_size=1)
        train_step(model, optimizer, batches, config=PROOF_CONFIG, step=0, group=dist.group.WORLD)

    with pytest.raises(RankError, match="21 of 21 tensors of the optimizer are not the model's"):
        two.run(on_rank)


def test_what_cannot_be_had_is_refused(two: Ranks) -> None:
    def on_rank(**options: Any) -> None:
        fully_sharded(Llama(PROOF_MODEL), **options)

    with pytest.raises(RankError, match=r"blocks_per_unit=3 must be in 1…2 \(blocks\)"):
        two.run(on_rank, blocks_per_unit=3)
    with pytest.raises(RankError, match="this model is in host memory already; use cpu_offload=F"):
        two.run(on_rank, cpu_offload=True)


def test_a_parameter_of_two_units_is_refused(two: Ranks) -> None:
    def on_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        fully_sharded(model)

    with pytest.raises(RankError, match=r"0.weight is shared across units, .* use parallel.zero"):
        two.run(on_rank)


def test_on_a_gpu_offload_is_torchs() -> None:
    gpu: Any = SimpleNamespace(device_type="cuda")
    assert fsdp._offload(gpu, cpu_offload=True) == CPUOffloadPolicy(pin_memory=True)
    assert fsdp._offload(gpu, cpu_offload=False) == OffloadPolicy()


def test_ranks_hold_shards_of_rank_0s_weights(two: Ranks) -> None:
    def on_rank() -> tuple[int, int, float]:
        model = fully_sharded(Llama(PROOF_MODEL, seed=dist.get_rank()))
        names = dict(Llama(PROOF_MODEL, seed=0).named_parameters())
        whole = {name: param.full_tensor() for name, param in model.named_parameters()}
        differences = [(whole[name] - names[name]).abs().max().item() for name in names]
        held = sum(param.to_local().numel() for param in model.parameters())
        return held, PROOF_MODEL.num_params, max(differences)

    for held, num_params, difference in two.run(on_rank):
        assert held == num_params / 2
        assert difference == 0
