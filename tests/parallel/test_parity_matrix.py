"""Strategy × precision × accumulation × checkpointing × tied or not: each equals one process.

150 combinations on 2 ranks. A test is one cell of the table without the strategy: all five are
compared with one run of the oracle on each rank. Pure bf16 adds micro batches up in 8 bits, in
another order on two ranks than on one: without accumulation it is equal too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.config import ModelConfig, TrainConfig
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.hand_ddp import BucketedDDP, OverlappedDDP, PerTensorDDP
from labsupport.parallel.layout import Layout
from labsupport.train.proof import RankProof, Wrap, compare
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, build, proof_batches, train

STRATEGIES: dict[str, Wrap] = {
    "per tensor": PerTensorDDP,
    "buckets": partial(BucketedDDP, bucket_bytes=2**13),
    "overlapped": partial(OverlappedDDP, bucket_bytes=2**13),
    "ddp": partial(data_parallel, bucket_cap_mb=1),
    "fsdp": fully_sharded,  # with autocast around it, as DDP; fsdp's own bf16 is in test_fsdp.py
}
CELLS = list(product(("fp32", "bf16"), (1, 2), ("none", "full", "selective"), ("untied", "tied")))
CELLS += [
    ("fp16", 1, "none", "tied"),
    ("fp16", 2, "full", "untied"),
    ("fp8-emulated", 1, "selective", "untied"),
    ("fp8-emulated", 2, "none", "tied"),
    ("bf16-pure", 1, "none", "tied"),
    ("bf16-pure", 1, "full", "untied"),
]
SMALLER = replace(PROOF_MODEL, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)


def all_strategies(model: ModelConfig, config: TrainConfig) -> dict[str, RankProof]:
    """On a rank: its proof of each strategy."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [proof_batches(step, config=config, world_size=world_size) for step in range(3)]
    oracle = train(build(model, config, seed=0), batches, config=config)
    k = config.gradient_accumulation_steps
    mine = [batch[rank * k :][:k] for batch in batches]
    proofs = {}
    for name, wrap in STRATEGIES.items():
        wrapped = wrap(build(model, config, seed=rank))
        run = train(wrapped, mine, config=config, group=dist.group.WORLD)
        proofs[name] = compare(run, oracle, layout=Layout.of_group(dist.group.WORLD))
    return proofs


@pytest.mark.parametrize(("precision", "accumulation", "recompute", "tied"), CELLS)
def test_cell(two: Ranks, precision: str, accumulation: int, recompute: str, tied: str) -> None:
    config = replace(
        PROOF_CONFIG,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=recompute,
    )
    model = replace(SMALLER, tie_word_embeddings=tied == "tied")
    for proofs in two.run(all_strategies, model, config):
        assert len(proofs) == len(STRATEGIES)
        wrong = {name: proof for name, proof in proofs.items() if not proof.is_equal}
        assert not wrong


def test_the_oracle_itself_learns_and_needs_no_ranks() -> None:
    """What all are equal to is a training run: losses fall on a batch that is seen again."""
    torch.set_num_threads(1)
    batches = [proof_batches(0, config=PROOF_CONFIG, world_size=2)] * 20
    config = replace(PROOF_CONFIG, steps=20)
    run = train(build(SMALLER, config, seed=0), batches, config=config)
    assert run.losses[-1] < run.losses[0] - 0.5
