"""Is a GPU, alone or with others, the same as one CPU process? Loss and weights after three steps.

SGD and fp32 without TF32: what differs is the order of additions. The oracle is `train_step` in one
process on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from torch.distributed.device_mesh import init_device_mesh

from labsupport import Ranks
from labsupport.config import ModelConfig, ParallelConfig, TrainConfig
from labsupport.data import Corpus, load_corpus
from labsupport.parallel.layout import Layout
from labsupport.train.assemble import distribute
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


def ways_of(ranks: int) -> dict[str, dict[str, Any]]:
    """Strategies that so many ranks can have, as settings of `ParallelConfig`."""
    dp = {"data_parallel_size": ranks}
    ways: dict[str, dict[str, Any]] = {
        "ddp": dp,
        "zero1": {**dp, "data_parallel_sharding": "zero1"},
        "zero2": {**dp, "data_parallel_sharding": "zero2"},
        "fsdp": {**dp, "data_parallel_sharding": "fsdp"},
        "hsdp": {
            **dp,
            "data_parallel_sharding": "hsdp",
            "data_parallel_replicate_size": ranks if ranks % 2 else 2,
        },
        "tp": {"tensor_parallel_size": ranks},
        "tp + sp": {"tensor_parallel_size": ranks, "sequence_parallel": ranks > 1},
        "cp": {"context_parallel_size": ranks},
        "cp, fsdp": {"context_parallel_size": ranks, "data_parallel_sharding": "fsdp"},
    }
    if ranks == 4:
        two = {"data_parallel_size": 2, "data_parallel_sharding": "fsdp"}
        ways["fsdp × tp + sp"] = {**two, "tensor_parallel_size": 2, "sequence_parallel": True}
        ways["fsdp × cp"] = {**two, "context_parallel_size": 2}
    return ways


BY_HAND = ("PerTensorDDP", "BucketedDDP", "OverlappedDDP", "zero3", "tensor_parallel_by_hand")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp", "hsdp", "tp + sp", "cp"])
def test_one_gpu_alone_runs_what_is_made_for_many(
    machine: Machine, corpus: Corpus, oracle: Trained, strategy: str
) -> None:
    with Ranks(1, device=machine.device) as pool:
        ((losses, weights),) = pool.run(train_on_rank, strategy, deadline_s=120)
    assert losses == pytest.approx(oracle[0], abs=1e-4)
    assert largest_difference(weights, oracle[1]) < 1e-4


@pytest.mark.parametrize("strategy", [*BY_HAND, *ways_of(4)])
def test_several_gpus_equal_one_process(ranks: Ranks, oracle: Trained, strategy: str) -> None:
    n = ranks.world_size
    if strategy not in (*BY_HAND, *ways_of(n)):
        pytest.skip(f"{strategy} takes 4 ranks, and there are {n}")
    if "t" in strategy[:2] and MODEL.num_heads % n:
        pytest.skip(f"{n} ranks cannot share {MODEL.num_heads} heads")
    for losses, weights in ranks.run(train_on_rank, strategy, deadline_s=120):
        assert losses == pytest.approx(oracle[0], abs=1e-4)
        assert largest_difference(weights, oracle[1]) < 1e-4


def here() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def train_on_rank(strategy: str) -> Trained:
    """One rank; every rank returns all weights."""
    from labsupport.parallel import hand_ddp
    from labsupport.parallel.tensor import tensor_parallel_by_hand
    from labsupport.parallel.zero import zero3

    n, device = dist.get_world_size(), here()
    way = ways_of(n).get(strategy, {"data_parallel_size": n})
    if strategy == "tensor_parallel_by_hand":
        way = {"tensor_parallel_size": n}
    parallel = ParallelConfig(**way)
    layout = Layout.build(parallel, device_type=device.type)
    corpus, config = load_corpus(), TrainConfig(**SGD)
    # Rank 0's weights must win.
    plain = build(MODEL, config, seed=dist.get_rank(), device=device)
    if strategy == "tensor_parallel_by_hand":
        model: Any = tensor_parallel_by_hand(plain, layout.mesh["tp"])
    elif strategy == "zero3":
        model = zero3(plain)
    elif strategy in BY_HAND:
        model = getattr(hand_ddp, strategy)(plain)
    else:
        precision = Precision.named("fp32", device=device.type)
        model = distribute(plain, parallel, layout=layout, precision=precision)
    sizes = {"seq_len": config.seq_len, "global_batch_size": GLOBAL_BATCH}
    place = {"rank": layout.dp_rank, "world_size": layout.dp_size}
    batches = [[corpus.batch(step, **sizes, **place)] for step in range(STEPS)]
    return kept_of(train(model, batches, config=config, layout=layout))


def test_torch_s_own_ring_gives_the_logits_of_one_gpu(ranks: Ranks) -> None:
    """In bf16: torch has its ring for the fused kernels of GPUs only."""
    outcomes = ranks.run(torch_s_ring, deadline_s=120)
    if isinstance(outcomes[0], str):
        pytest.skip(outcomes[0])
    assert max(outcomes) < 0.05


def torch_s_ring() -> float | str:
    """Largest difference from this rank's part of the whole; or why there is none."""
    from labsupport.parallel.context import shard_sequence
    from labsupport.parallel.context.native import native_context_parallel

    rank, n, device = dist.get_rank(), dist.get_world_size(), here()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("cp",))
    model = build(
        replace(MODEL, num_kv_heads=MODEL.num_heads), TrainConfig(), seed=0, device=device
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MODEL.vocab_size, (2, 64 * n), generator=generator).to(device)
    mine, positions = ids.clone(), torch.arange(64 * n, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        whole = model(ids).float()
        try:
            with native_context_parallel(mesh["cp"], [mine, positions]):
                part = model(mine, positions=positions).float()
        except ValueError as reason:
            return str(reason)
    expected = shard_sequence(whole, rank, n, dim=1)
    return float((part - expected).abs().max() / expected.abs().max())
