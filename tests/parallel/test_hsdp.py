"""Hybrid: shards inside a group of ranks, copies across groups; equal to one process, counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labsupport import Ranks
from labsupport.config import ModelConfig, TrainConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.fsdp import fully_sharded
from labsupport.plan.parameter_shapes import shapes_of
from labsupport.plan.sharding import shard
from labsupport.train.proof import prove_equal
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL

TIED = replace(PROOF_MODEL, tie_word_embeddings=True)


def hybrid(model: Llama, *, replicas: int = 2, **options: Any) -> Any:
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_sharded(model, mesh=mesh, **options)


CELLS: list[tuple[ModelConfig, dict[str, Any], dict[str, Any]]] = [
    (PROOF_MODEL, {}, {}),
    (TIED, {"activation_checkpointing": "full"}, {"reshard_after_forward": False}),
    (TIED, {"mixed_precision": "bf16", "gradient_accumulation_steps": 1}, {"blocks_per_unit": 2}),
    (PROOF_MODEL, {"activation_checkpointing": "selective", "optimizer": "sgd"}, {"replicas": 4}),
]


@pytest.mark.parametrize(("model", "settings", "options"), CELLS)
def test_equal_to_one_process(
    four: Ranks, model: ModelConfig, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    config: TrainConfig = replace(PROOF_CONFIG, **settings)
    proof = prove_equal(four, partial(hybrid, **options), model=model, config=config)
    assert proof.is_equal, proof


def test_on_two_ranks_it_is_ddp_or_fsdp(two: Ranks) -> None:
    for replicas in (1, 2):
        proof = prove_equal(two, partial(hybrid, replicas=replicas))
        assert all(max(r.gradients, r.weights, r.grad_norm) < 1e-5 for r in proof.ranks), proof


def test_bytes_held_and_sent_are_those_of_the_plan(four: Ranks) -> None:
    def on_rank() -> tuple[int, int, dict[str, int], list[torch.Tensor]]:
        model = hybrid(Llama(PROOF_MODEL, seed=dist.get_rank()))
        with count_collective_bytes() as counted:
            model(torch.arange(8).view(1, 8)).sum().backward()
        shards = [param.to_local().detach().clone() for param in model.parameters()]
        gradients = sum(param.grad.to_local().nbytes for param in model.parameters())
        sent = {name: sum(sizes) for name, sizes in counted.sizes_bytes.items()}
        return sum(tensor.nbytes for tensor in shards), gradients, sent, shards

    plan = shard(shapes_of(PROOF_MODEL), stage="hsdp", world_size=4, replicate_size=2)
    found = four.run(on_rank)
    names = {"allgather": "all_gather", "allreduce": "all_reduce"}
    for rank, (held, gradients, sent, shards) in enumerate(found):
        assert held == plan.held[rank].parameters_bytes == PROOF_MODEL.num_params * 4 // 2
        assert gradients == plan.held[rank].gradients_bytes
        assert {names.get(name, name): size for name, size in sent.items()} == plan.exchanged_bytes
        twin = found[(rank + 2) % 4][-1]  # the same shard in the other copy
        assert all(torch.equal(a, b) for a, b in zip(shards, twin, strict=True))


def test_across_copies_only_a_shard_of_the_gradients_travels() -> None:
    """What HSDP is for: the slow link between the groups carries 1/n of them."""
    plan = shard(shapes_of(PROOF_MODEL), stage="hsdp", world_size=4, replicate_size=2)
    gradients = PROOF_MODEL.num_params * 4
    assert plan.exchanged_bytes["reduce_scatter"] == gradients
    assert plan.exchanged_bytes["all_reduce"] == gradients // 2
