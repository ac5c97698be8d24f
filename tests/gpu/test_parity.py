"""Is a GPU, alone or with others, the same as one CPU process? Loss and weights after three steps.

SGD and fp32 without TF32: what differs is the order of additions. The oracle is `train_step` in one
process on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from conftest import Machine

from labsupport import Ranks
from labsupport.config import ModelConfig, TrainConfig
from labsupport.data import Corpus, load_corpus
from labsupport.train.precision import Precision
from labsupport.train.proof_run import TrainedRun, build, train

MODEL = ModelConfig(
    vocab_size=2048, hidden_size=64, intermediate_size=176, num_layers=3, num_heads=4,
    num_kv_heads=2, tie_word_embeddings=True,
)  # fmt: skip
STEPS = 3
GLOBAL_BATCH = 8
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "warmup_steps": 0, "seq_len": 64, "steps": STEPS}
Trained = tuple[list[float], dict[str, torch.Tensor]]


def train_alone(
    corpus: Corpus, *, device: str, recompute: str = "none", **settings: Any
) -> Trained:
    """Losses and weights, on the CPU, of one process on `device`."""
    config = TrainConfig(**{**SGD, **settings}, activation_checkpointing=recompute)
    batches = [
        corpus.batch(step, seq_len=config.seq_len, global_batch_size=GLOBAL_BATCH).micro_batches(2)
        for step in range(config.steps)
    ]
    return kept_of(train(build(MODEL, config, seed=0, device=device), batches, config=config))


def kept_of(run: TrainedRun) -> Trained:
    return run.losses, {name: value.float().cpu() for name, value in run.weights.items()}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def oracle(corpus: Corpus) -> Trained:
    return train_alone(corpus, device="cpu")


@pytest.fixture(scope="module")
def ranks(several: int) -> Iterator[Ranks]:
    with Ranks(several) as pool:
        yield pool


def test_one_gpu_equals_the_cpu(machine: Machine, corpus: Corpus, oracle: Trained) -> None:
    losses, weights = train_alone(corpus, device=machine.device)
    assert losses == pytest.approx(oracle[0], abs=1e-4)
    assert largest_difference(weights, oracle[1]) < 1e-4


@pytest.mark.parametrize("recompute", ["full", "every-2", "selective", "offload"])
def test_recomputation_changes_nothing(machine: Machine, corpus: Corpus, recompute: str) -> None:
    if recompute == "offload" and machine.device == "cpu":
        pytest.skip("a CPU has no other memory to offload to")
    plain = train_alone(corpus, device=machine.device)
    again = train_alone(corpus, device=machine.device, recompute=recompute)
    assert again[0] == pytest.approx(plain[0], abs=1e-6)
    assert largest_difference(again[1], plain[1]) < 1e-5


@pytest.mark.parametrize("name", ["bf16", "bf16-pure", "fp16", "fp8"])
def test_half_precision_stays_near_fp32(machine: Machine, corpus: Corpus, name: str) -> None:
    try:
        Precision.named(name, device=machine.device)
    except ValueError as reason:
        pytest.skip(str(reason))
    losses, _ = train_alone(corpus, device=machine.device, mixed_precision=name)
    whole, _ = train_alone(corpus, device=machine.device)
    assert losses == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    "strategy", ["PerTensorDDP", "BucketedDDP", "OverlappedDDP", "ddp", "fsdp"]
)
def test_several_gpus_equal_one_process(ranks: Ranks, oracle: Trained, strategy: str) -> None:
    for losses, weights in ranks.run(train_on_rank, strategy, deadline_s=120):
        assert losses == pytest.approx(oracle[0], abs=1e-4)
        assert largest_difference(weights, oracle[1]) < 1e-4


def train_on_rank(strategy: str) -> Trained:
    """One data-parallel rank; every rank returns all weights."""
    import torch.distributed as dist

    from labsupport.parallel import hand_ddp
    from labsupport.parallel.ddp import data_parallel
    from labsupport.parallel.fsdp import fully_sharded

    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    corpus, config = load_corpus(), TrainConfig(**SGD)
    plain = build(MODEL, config, seed=rank, device=device)  # rank 0's weights must win
    wrap = {"ddp": data_parallel, "fsdp": fully_sharded}.get(strategy)
    model = wrap(plain) if wrap else getattr(hand_ddp, strategy)(plain)
    sizes = {"seq_len": config.seq_len, "global_batch_size": GLOBAL_BATCH}
    place = {"rank": rank, "world_size": world_size}
    batches = [[corpus.batch(step, **sizes, **place)] for step in range(STEPS)]
    return kept_of(train(model, batches, config=config, group=dist.group.WORLD))
