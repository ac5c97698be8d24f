"""Fully sharded: equal to one process on 1, 2 and 4 ranks, in fp32 and bf16, with tied weights too.

In bf16 the whole block computes narrow, not only its matrix products as under autocast. Its oracle
is therefore the same on a mesh of one rank, and autocast in one process only to bf16's precision.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labsupport import Ranks
from labsupport.model import Llama
from labsupport.parallel.fsdp import fully_sharded
from labsupport.train.proof import RankProof, prove_equal, prove_on_rank
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL

TIED = replace(PROOF_MODEL, tie_word_embeddings=True)
CHECKPOINTED = replace(PROOF_CONFIG, mixed_precision="bf16", activation_checkpointing="full")


def sharded_alone(model: Llama, *, compute_dtype: torch.dtype | None = None) -> Any:
    """The same recipe on a mesh of this rank only."""
    shape = (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_sharded(model, mesh=mesh["dp_shard"], compute_dtype=compute_dtype)


def bf16_against_one_rank() -> RankProof:
    bf16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
    return prove_on_rank(
        partial(fully_sharded, **bf16),
        wrap_alone=partial(sharded_alone, **bf16),
        config=CHECKPOINTED,
    )


def prove_all(ranks: Ranks) -> None:
    for model in (PROOF_MODEL, TIED):
        proof = prove_equal(ranks, fully_sharded, model=model)
        assert proof.is_equal, proof
    bf16 = ranks.run(bf16_against_one_rank)
    assert all(rank.is_equal for rank in bf16), bf16
    narrow = partial(fully_sharded, compute_dtype=torch.bfloat16)
    proof = prove_equal(ranks, narrow, config=CHECKPOINTED, tolerance=0.05)
    assert proof.is_equal, proof


def test_two_ranks(two: Ranks) -> None:
    prove_all(two)


@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(world_size: int) -> None:
    with Ranks(world_size, device="cpu", threads_per_rank=1, collective_timeout_s=20) as ranks:
        prove_all(ranks)


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
