"""Precision recipes: what is kept in which type, how far losses part, one verdict on overflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labsupport import Ranks, devices
from labsupport.config import MixedPrecision, ModelConfig, Optimizer, TrainConfig
from labsupport.data import Batch
from labsupport.model import Llama
from labsupport.train import build_optimizer, train_step
from labsupport.train.fp8 import Fp8Linear
from labsupport.train.kept_types import KeptTypes, kept_types
from labsupport.train.precision import Precision

SMALL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1
)
CONFIG = TrainConfig(micro_batch_size=4, seq_len=16, warmup_steps=0, learning_rate=1e-2)
HERE: list[MixedPrecision] = ["fp32", "bf16", "bf16-pure", "fp16", "fp8-emulated"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, threads_per_rank=1, device="cpu") as pool:
        yield pool


def batch(rows: int = 4, seed: int = 0) -> Batch:
    """Text in which every token tells the next, so that a few steps teach something."""
    start = torch.randint(64, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + 3 * torch.arange(17)) % 64
    return Batch(ids[:, :-1], ids[:, 1:])


def losses(name: MixedPrecision, steps: int) -> list[float]:
    precision = Precision.named(name)
    model = precision.prepare(Llama(SMALL))
    optimizer, scaler = build_optimizer(model, CONFIG), precision.grad_scaler()
    return [
        train_step(
            model, optimizer, [batch()], config=CONFIG, step=i, precision=precision, scaler=scaler
        ).loss
        for i in range(steps)
    ]


def test_all_recipes_train_and_stay_within_the_rounding_of_their_type() -> None:
    reference = losses("fp32", 6)
    assert reference[-1] < reference[0] - 1
    # In units of the last place of 1.0: products of matrices average it, Adam's sign magnifies it.
    for name, last_place in (("bf16", 2**-8), ("bf16-pure", 2**-8), ("fp16", 2**-11)):
        first, last = (abs(losses(name, 6)[i] - reference[i]) for i in (0, -1))  # type: ignore[arg-type]
        assert 0 < first < 2 * last_place, name
        assert last < 40 * last_place, name
    assert abs(losses("fp8-emulated", 6)[-1] - reference[-1]) < 0.3


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", HERE)
def test_a_step_changes_every_matrix(name: MixedPrecision, optimizer: Optimizer) -> None:
    precision = Precision.named(name)
    model = precision.prepare(Llama(SMALL))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = TrainConfig(optimizer=optimizer, learning_rate=0.5, warmup_steps=0)
    scaler = precision.grad_scaler(init_scale=2.0**10)
    done = train_step(
        model,
        build_optimizer(model, config),
        [batch()],
        config=config,
        step=0,
        precision=precision,
        scaler=scaler,
    )
    assert not done.skipped
    same = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert not [key for key in same if "norm" not in key]


def table_of(name: MixedPrecision) -> KeptTypes:
    precision = Precision.named(name)
    model = precision.prepare(Llama(SMALL))
    assert isinstance(model, Llama)
    return kept_types(model, build_optimizer(model, CONFIG), batch(), precision=precision)


@pytest.mark.parametrize(
    ("name", "kept", "products", "copies"),
    [
        ("fp32", "float32", "float32", ()),
        ("bf16", "float32", "bfloat16", ("bfloat16",)),
        ("bf16-pure", "bfloat16", "bfloat16", ()),
        ("fp16", "float32", "float16", ("float16",)),
        ("fp8-emulated", "float32", "bfloat16", ("float8_e4m3fn", "bfloat16")),
    ],
)
def test_what_is_kept_in_which_type(
    name: MixedPrecision, kept: str, products: str, copies: tuple[str, ...]
) -> None:
    table, size = table_of(name), SMALL.num_params * (2 if kept == "bfloat16" else 4)
    for what, num_bytes in (
        ("parameters", size),
        ("gradients", size),
        ("optimizer moments", 2 * size),
    ):
        assert table[what].num_bytes == {kept: num_bytes}, what
    assert set(table["narrow copies of weights"].dtypes) == set(copies)
    assert table["linear layers"].dtypes == table["logits"].dtypes == (products,)
    for what in ("norms, inside", "log-softmax", "loss", "gradient norm"):
        assert table[what].dtypes == ("float32",), what
    assert name in table._repr_html_()
    assert "narrow copies" in repr(table)


def test_bf16_narrows_activations_and_adds_copies_of_the_weights() -> None:
    fp32, bf16, fp8 = table_of("fp32"), table_of("bf16"), table_of("fp8-emulated")
    assert bf16["parameters"] == fp32["parameters"]
    assert 0.5 < bf16["activations"].total_bytes / fp32["activations"].total_bytes < 0.8
    in_blocks = SMALL.num_params - 2 * 64 * 32 - 5 * 32  # without embedding, lm_head and norms
    assert bf16["narrow copies of weights"].total_bytes == 2 * (in_blocks + 64 * 32)
    assert fp8["narrow copies of weights"].num_bytes["float8_e4m3fn"] == in_blocks


def test_fp8_needs_the_hardware_and_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'cpu' has no GPU; 'fp8-emulated' rounds") as caught:
        Precision.named("fp8")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(devices, "compute_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0; 'fp8-emulated'"):
        Precision.named("fp8", device="cuda:1")
    monkeypatch.setattr(devices, "compute_capability", lambda device: (9, 0))
    precision = Precision.named("fp8", device="cuda:1")
    assert precision.device == "cuda"
    assert not precision.is_emulated
    model = precision.prepare(Llama(SMALL))
    narrow = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert narrow
    assert not any(module.emulated for module in narrow)


def test_a_cpu_has_no_compute_capability() -> None:
    assert devices.compute_capability("cpu") is None
    assert Precision.named("fp8-emulated").is_emulated


def test_an_unknown_name_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="bf16-pure"):
        Precision.named("bfloat16")  # type: ignore[arg-type]


def test_only_fp16_scales_the_loss() -> None:
    scaler = Precision.named("fp16").grad_scaler(init_scale=8.0, growth_interval=5)
    assert scaler is not None
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 5)
    assert all(Precision.named(name).grad_scaler() is None for name in HERE if name != "fp16")


def test_an_overflow_is_survived_and_the_scale_returns() -> None:
    precision = Precision.named("fp16")
    model = precision.prepare(Llama(SMALL))
    optimizer = build_optimizer(model, CONFIG)
    scaler = precision.grad_scaler(init_scale=2.0**24, growth_interval=3)
    done = [
        train_step(
            model, optimizer, [batch()], config=CONFIG, step=i, precision=precision, scaler=scaler
        )
        for i in range(16)
    ]
    scale, good = 2.0**24, 0
    for one in done:  # halved after an overflow, doubled after three good steps in a row
        assert one.loss_scale == scale
        good = 0 if one.skipped else good + 1
        scale *= 0.5 if one.skipped else 2.0 if good == 3 else 1.0
        good %= 3
    skipped = [one.skipped for one in done]
    first_good = skipped.index(False)
    assert first_good > 0
    assert max(one.loss_scale for one in done[first_good:]) > done[first_good].loss_scale, (
        "it never returned"
    )
    assert done[-1].loss < done[0].loss


def overflow_on_ranks(poison_rank: int | None) -> dict[str, Any]:
    """Six fp16 steps on each rank; at step 3 one rank's logits become NaN, if asked for."""
    rank = dist.get_rank()
    precision = Precision.named("fp16")
    model = DistributedDataParallel(precision.prepare(Llama(SMALL)))
    optimizer = build_optimizer(model, CONFIG)
    scaler = precision.grad_scaler(init_scale=2.0**20 if poison_rank is None else 2.0**10)
    done, weights = [], []
    for step in range(6):
        if step == 3 and rank == poison_rank:
            handle = model.module.lm_head.register_forward_hook(lambda m, a, out: out * torch.nan)
        done.append(
            train_step(
                model,
                optimizer,
                [batch(seed=rank)],
                config=CONFIG,
                step=step,
                precision=precision,
                scaler=scaler,
                group=dist.group.WORLD,
            )
        )
        if step == 3 and rank == poison_rank:
            handle.remove()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    assert scaler is not None
    return {"done": done, "weights": weights, "scale": scaler.get_scale()}


def test_overflow_is_decided_once_for_all_ranks(ranks: Ranks) -> None:  # case T15
    one, other = ranks.run(overflow_on_ranks, None, deadline_s=60)
    flags = [step.skipped for step in one["done"]]
    assert flags[0]
    assert not flags[-1]
    assert [(s.skipped, s.loss_scale) for s in one["done"]] == [
        (s.skipped, s.loss_scale) for s in other["done"]
    ]
    assert one["scale"] == other["scale"] == 2.0 ** (20 - sum(flags))
    for step in range(6):
        assert torch.equal(one["weights"][step], other["weights"][step])
        if step:
            moved = not torch.equal(one["weights"][step], one["weights"][step - 1])
            assert moved is not flags[step]


def test_a_nan_on_one_rank_is_skipped_by_both_and_the_rank_is_named(ranks: Ranks) -> None:  # T15
    one, other = ranks.run(overflow_on_ranks, 1, deadline_s=60)
    for result in (one, other):
        assert [step.skipped for step in result["done"]] == [False] * 3 + [True] + [False] * 2
        assert result["done"][3].nonfinite_ranks == (1,)
        assert result["scale"] == 2.0**9
        assert torch.equal(result["weights"][3], result["weights"][2])
        assert result["weights"][-1].isfinite().all()
    assert torch.equal(one["weights"][-1], other["weights"][-1])


def test_gloo_reduces_bf16(ranks: Ranks) -> None:  # case T16
    def reduce(dtype: torch.dtype) -> list[float]:
        tensor = torch.tensor([1.0, 256.0, 0.1], dtype=dtype) * (1 + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.tolist()

    for one in ranks.run(reduce, torch.bfloat16):
        assert one[:2] == [3.0, 768.0]
        assert one[2] == pytest.approx(0.3, rel=2**-8)
        assert one[2] != pytest.approx(0.3, rel=2**-12)  # it did travel in 8 bits of precision
