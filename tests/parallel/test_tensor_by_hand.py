"""Tensor parallelism by hand: each function, layer and the loss; equal to one process; to the byte.

The proof takes torch's loss on split logits and the hand-written one. Tensor parallelism alone
exchanges activations, so that the proof has nothing to say on how often gradients travel: the bytes
are compared with `plan.tensor_parallel` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from labsupport import RankError, Ranks
from labsupport.config import IGNORE_INDEX, ModelConfig, ParallelConfig, Recompute
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.measure.memory import MemoryTracker
from labsupport.model import Llama, token_loss
from labsupport.parallel.activation_checkpointing import checkpoint_activations
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import (
    tensor_parallel,
    tensor_parallel_by_hand,
    vocab_parallel_token_loss,
)
from labsupport.parallel.tensor.functions import (
    copy_to_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sequence,
)
from labsupport.plan.tensor_parallel import local_shapes, tensor_parallel_calls
from labsupport.train import step as step_module
from labsupport.train.fp8 import put_fp8_linears_in
from labsupport.train.proof import Proof, RankProof, prove_equal, prove_on_rank
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL

UNEVEN = replace(PROOF_MODEL, vocab_size=67, tie_word_embeddings=True)
TIED = replace(PROOF_MODEL, tie_word_embeddings=True)
ONE_KV_HEAD = replace(PROOF_MODEL, num_kv_heads=1)
BY_3 = ModelConfig(
    vocab_size=64, hidden_size=48, intermediate_size=48, num_layers=2, num_heads=6, num_kv_heads=3,
    tie_word_embeddings=True,
)  # fmt: skip
RECIPES = [tensor_parallel_by_hand, tensor_parallel]
Recipe = Callable[..., Llama]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, device="cpu", threads_per_rank=1, collective_timeout_s=20) as ranks:
        yield ranks


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def by_hand(model: Llama, layout: Layout, *, sequence_parallel: bool = False) -> Llama:
    assert layout.mesh is not None
    tp = layout.mesh["tp"]
    return tensor_parallel_by_hand(model, tp, sequence_parallel=sequence_parallel)


def own_loss(logits: Tensor, labels: Tensor) -> Any:
    is_split = isinstance(logits, DTensor)  # the oracle's are not
    return (vocab_parallel_token_loss if is_split else token_loss)(logits, labels)


def prove_with_own_loss(wrap: Any, **case: Any) -> RankProof:
    """On a rank: the proof, with the hand-written loss in the training step."""
    with patch.object(step_module, "token_loss", own_loss):
        return prove_on_rank(wrap, **case)


def prove_all(ranks: Ranks, world_size: int, model: ModelConfig, **case: Any) -> None:
    """With the hand-written loss, and under sequence parallel with torch's."""
    case["model"] = model
    case["parallel"] = ParallelConfig(tensor_parallel_size=world_size)
    proof = Proof(tuple(ranks.run(prove_with_own_loss, by_hand, **case)))
    assert proof.is_equal, proof
    case["parallel"] = replace(case["parallel"], sequence_parallel=True)
    proof = prove_equal(ranks, partial(by_hand, sequence_parallel=True), **case)
    assert proof.is_equal, proof


# ---- equal to one process ----------------------------------------------------------------------


@pytest.mark.parametrize("model", [UNEVEN, ONE_KV_HEAD])
def test_two_ranks(two: Ranks, model: ModelConfig) -> None:
    """Four ranks, other types, recomputation and further axes: test_parity_shards.py."""
    prove_all(two, 2, model)


def test_three_ranks_and_64_tokens_for_them(three: Ranks) -> None:
    """No power of two: heads and feed-forward divide by 3, the vocabulary need not."""
    prove_all(three, 3, BY_3, config=replace(PROOF_CONFIG, seq_len=9))


def test_dropout_is_the_same_on_ranks_that_see_the_same(two: Ranks) -> None:
    def on_rank() -> list[float]:
        torch.manual_seed(0)
        model = tensor_parallel_by_hand(Llama(PROOF_MODEL, dropout=0.5), tp_mesh())
        ids = torch.arange(16).view(2, 8)
        with loss_parallel():
            token_loss(model(ids), ids).sum.backward()
        norms = [p.grad.to_local() for n, p in model.named_parameters() if "norm" in n]
        return [float(norm.abs().sum()) for norm in norms]

    first, second = two.run(on_rank)
    assert first == second


# ---- functions ---------------------------------------------------------------------------------


def test_functions_and_their_mirrors(two: Ranks) -> None:
    """Rank r has x = r + 1 and the gradient of its result is 10 · (r + 1)."""

    def on_rank(function: Any, seq_len: int) -> tuple[Any, Any]:
        rank = dist.get_rank()
        x = torch.full((1, seq_len, 1), rank + 1.0, requires_grad=True)
        y = function(x, dist.group.WORLD)
        y.backward(torch.full_like(y, 10.0 * (rank + 1)))
        assert x.grad is not None
        return y.flatten().tolist(), x.grad.flatten().tolist()

    assert two.run(on_rank, copy_to_ranks, 1) == [([1], [30]), ([2], [30])]
    assert two.run(on_rank, reduce_from_ranks, 1) == [([3], [10]), ([3], [20])]
    assert two.run(on_rank, gather_sequence, 1) == [([1, 2], [30]), ([1, 2], [30])]
    assert two.run(on_rank, scatter_sequence, 2) == [([3], [10, 20]), ([3], [10, 20])]


def test_tokens_keep_their_order(two: Ranks) -> None:
    def on_rank() -> tuple[list[int], list[int]]:
        rank, group = dist.get_rank(), dist.group.WORLD
        text = torch.arange(2 * 6 * 3).view(2, 6, 3)
        mine = text[:, rank * 3 :][:, :3]
        whole = gather_sequence(mine, group)
        part = scatter_sequence(text // 2, group)
        return (whole - text).flatten().tolist(), (part - 2 * (mine // 2)).flatten().tolist()

    for gathered, scattered in two.run(on_rank):
        assert set(gathered) == set(scattered) == {0}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sequence_that_does_not_divide_is_refused(two: Ranks, recipe: Recipe) -> None:
    def on_rank() -> None:
        model = recipe(Llama(PROOF_MODEL), tp_mesh(), sequence_parallel=True)
        model(torch.zeros(1, 7, dtype=torch.int64))

    with pytest.raises(RankError, match=r"seq_len=7 must be a multiple of the 2 .* example 6"):
        two.run(on_rank)


# ---- loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [12, 13])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_loss_of_split_logits(two: Ranks, vocab_size: int, scale: float) -> None:
    """Also where exp of the largest logit overflows, and where a whole row is padding."""

    def on_rank(dtype: torch.dtype) -> tuple[float, float, int, torch.dtype]:
        generator = torch.Generator().manual_seed(0)
        whole = (torch.randn(2, 5, vocab_size, generator=generator) * scale).to(dtype)
        labels = torch.randint(vocab_size, (2, 5), generator=generator)
        labels[0, 2:], labels[1] = IGNORE_INDEX, labels[1].clamp(min=vocab_size - 2)
        mine = whole.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
        whole.requires_grad_()
        expected = token_loss(whole, labels)
        found = vocab_parallel_token_loss(
            mine, labels, dist.group.WORLD, vocab_size=vocab_size
        )  # fmt: skip
        (3 * found.sum).backward()
        (3 * expected.sum).backward()
        assert mine.grad is not None
        assert whole.grad is not None
        theirs = whole.grad.chunk(2, dim=-1)[dist.get_rank()]
        off = (found.sum - expected.sum).abs().item() / expected.sum.item()
        tokens = int(found.num_tokens - expected.num_tokens)
        return off, (mine.grad - theirs).abs().max().item(), tokens, mine.grad.dtype

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        for off, gradient, tokens, grad_dtype in two.run(on_rank, dtype):
            assert off < tolerance
            assert gradient < tolerance
            assert tokens == 0
            assert grad_dtype == dtype


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_model_has_its_loss_and_norm_as_one_process_does(
    two: Ranks, recipe: Recipe
) -> None:
    """By the means of a plain loop, and although one sequence has no valid label."""

    def on_rank() -> list[tuple[float, float]]:
        ids = 4 * torch.arange(16).view(2, 8)  # from all of the vocabulary
        labels = ids.clone()
        labels[0] = IGNORE_INDEX
        found = []
        for model in (Llama(UNEVEN), recipe(Llama(UNEVEN), tp_mesh(), sequence_parallel=True)):
            loss = model.loss(ids, labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            found.append((loss.item(), norm.item()))
        return found

    for alone, split in two.run(on_rank):
        assert split == pytest.approx(alone, rel=1e-5)


def test_loss_refuses_labels_of_another_shape(two: Ranks) -> None:
    def on_rank() -> None:
        labels = torch.zeros(2, 4, dtype=torch.int64)
        vocab_parallel_token_loss(torch.zeros(2, 5, 6), labels, dist.group.WORLD)

    with pytest.raises(RankError, match=r"labels of shape \(2, 4\) must match .*\(2, 5\)"):
        two.run(on_rank)


# ---- bytes -------------------------------------------------------------------------------------


def one_step(
    recipe: Recipe, model: ModelConfig, sequence_parallel: bool, recompute: Recompute
) -> dict[str, tuple[int, int]]:
    """On a rank: calls and bytes of each collective of a step of 2 micro batches of 2 × 12."""
    llama = recipe(Llama(model), tp_mesh(), sequence_parallel=sequence_parallel)
    checkpoint_activations(llama, recompute)
    ids = torch.arange(24).view(2, 12)
    with count_collective_bytes() as counted, loss_parallel():
        for _ in range(2):
            token_loss(llama(ids), ids).sum.backward()
    return {name: (len(sizes), sum(sizes)) for name, sizes in counted.sizes_bytes.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_the_formulas_to_the_byte(
    two: Ranks, recipe: Recipe, sequence_parallel: bool
) -> None:
    case = {"micro_batch_size": 2, "seq_len": 12, "num_micro_batches": 2}
    case["tensor_parallel_size"] = 2
    for model in (TIED, ONE_KV_HEAD):
        for recompute in (Recompute(), Recompute(mode="full"), Recompute(mode="full", every=2)):
            planned = tensor_parallel_calls(
                model, **case, sequence_parallel=sequence_parallel, recompute=recompute
            )
            expected: dict[str, tuple[int, int]] = {}
            for calls in planned.calls:
                name = {"all_reduce": "allreduce", "all_gather": "allgather"}.get(calls.kind)
                count, size_bytes = expected.get(name or calls.kind, (0, 0))
                expected[name or calls.kind] = (count + calls.count, size_bytes + calls.total_bytes)
            for found in two.run(one_step, recipe, model, sequence_parallel, recompute):
                assert found == expected


def test_four_all_reduces_a_layer_and_the_same_volume_with_sequence_parallel(two: Ranks) -> None:
    """By hand, without the planner: b·s·h numbers of 4 bytes, for each of two layers."""
    stream = 2 * 12 * PROOF_MODEL.hidden_size * 4
    loss = 3 * 2 * 12 * 4
    norms = (2 * 2 + 1) * PROOF_MODEL.hidden_size * 4
    plain = two.run(one_step, tensor_parallel_by_hand, PROOF_MODEL, False, Recompute())[0]
    split = two.run(one_step, tensor_parallel_by_hand, PROOF_MODEL, True, Recompute())[0]
    assert plain["allreduce"] == (2 * (4 * 2 + 2 + 3), 2 * ((4 * 2 + 2) * stream + loss))
    assert split["allgather"] == split["reduce_scatter"] == (2 * 10, 2 * 10 * stream)
    assert split["allreduce"] == (2 * (5 + 3), 2 * (norms + loss))


# ---- what a rank holds -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_are_the_planned_ones_of_rank_0s_weights(three: Ranks, recipe: Recipe) -> None:
    def on_rank() -> tuple[dict[str, tuple[int, ...]], int, float]:
        model = recipe(Llama(BY_3, seed=dist.get_rank()), tp_mesh())
        whole = dict(Llama(BY_3, seed=0).named_parameters())
        found = dict(model.named_parameters())
        assert found.keys() == whole.keys()
        local = {name: p.to_local() for name, p in found.items()}  # type: ignore[operator]
        differences = [(p.full_tensor() - whole[n]).abs().max() for n, p in found.items()]  # type: ignore[operator]
        spare_bytes = sum(t.untyped_storage().nbytes() - 4 * t.numel() for t in local.values())
        return {n: tuple(t.shape) for n, t in local.items()}, spare_bytes, float(max(differences))

    for rank, (shapes, spare_bytes, difference) in enumerate(three.run(on_rank)):
        assert shapes == local_shapes(BY_3, tensor_parallel_size=3, rank=rank)
        assert spare_bytes == 0  # no shard is a view that keeps the whole matrix
        assert difference == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_sequence_parallel_keeps_less_and_logits_are_never_whole(
    two: Ranks, recipe: Recipe
) -> None:
    def largest(split: Recipe | None, sequence_parallel: bool) -> tuple[int, int]:
        model = Llama(replace(PROOF_MODEL, vocab_size=512))
        if split is not None:
            split(model, tp_mesh(), sequence_parallel=sequence_parallel)
        optimizer, ids = torch.optim.SGD(model.parameters()), torch.arange(64).view(2, 32)
        with MemoryTracker(model, optimizer) as memory, loss_parallel():
            token_loss(model(ids), ids).sum.backward()
            optimizer.step()
        timeline = memory.timeline()
        return timeline.largest("activations"), timeline.largest("logits")

    whole, all_logits = two.run(largest, None, False)[0]
    (plain, logits), (split, _) = (
        two.run(largest, recipe, False)[0],
        two.run(largest, recipe, True)[0],
    )
    assert logits < all_logits  # torch's loss holds 4 copies of half of them, not 3 of all
    # In each of 2 layers 4 tensors b·s·h, of 5, are now of half the tokens: what goes into a norm
    # and comes out of it; what was gathered for a matrix product is kept whole.
    assert plain - split == pytest.approx(2 * 4 * 64 * 32 * 4 / 2, rel=0.3)
    assert split < plain < whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_parameters_stay_frozen(two: Ranks, recipe: Recipe) -> None:
    def on_rank() -> set[str]:
        model = Llama(PROOF_MODEL)
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
        model = recipe(model, tp_mesh(), sequence_parallel=True)
        ids = torch.arange(8).view(1, 8)
        with loss_parallel():
            token_loss(model(ids), ids).sum.backward()
        return {name for name, param in model.named_parameters() if param.grad is not None}

    for trained in two.run(on_rank):
        assert len(trained) == 9
        assert all(name.startswith("model.layers.1.") for name in trained)


# ---- refused before anything is split ----------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 1, "num_kv_heads": 1}, "tensor_parallel_size=2 must divide num_heads=1"),
        ({"intermediate_size": 49}, "tensor_parallel_size=2 must divide intermediate_size=49"),
        ({"vocab_size": 1}, "vocab_size=1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    two: Ranks, recipe: Recipe, change: dict[str, int], message: str
) -> None:
    def on_rank() -> None:
        recipe(Llama(replace(PROOF_MODEL, **change)), tp_mesh())

    with pytest.raises(RankError, match=message):
        two.run(on_rank)


@pytest.mark.parametrize("recipe", RECIPES)
def test_wrapped_split_and_fp8_models_are_refused(two: Ranks, recipe: Recipe) -> None:
    def split_twice() -> None:
        recipe(tensor_parallel_by_hand(Llama(PROOF_MODEL), tp_mesh()), tp_mesh())

    def wrapped() -> None:
        recipe(nn.Sequential(Llama(PROOF_MODEL)), tp_mesh())

    def fp8() -> None:
        recipe(put_fp8_linears_in(Llama(PROOF_MODEL), emulated=True), tp_mesh())

    def two_axes() -> None:
        recipe(Llama(PROOF_MODEL), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))

    for refused, message in (
        (split_twice, "Llama is wrapped or split already; tensor parallelism comes first"),
        (wrapped, "Sequential is wrapped or split already"),
        (fp8, "the model has Fp8Linear.*use mixed_precision='bf16'"),
        (two_axes, r"give one, as in mesh\['tp'\]"),
    ):
        with pytest.raises(RankError, match=message):
            two.run(refused)
