"""Ring attention equals attention: outputs, gradients, whole models; what it sends and holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

from labsupport import RankError, Ranks
from labsupport.config import ModelConfig, ParallelConfig, Recompute
from labsupport.measure.sent import count_sent_bytes
from labsupport.model import Llama, causal_attention, token_loss
from labsupport.parallel.activation_checkpointing import checkpoint_activations
from labsupport.parallel.context import (
    context_parallel,
    contiguous_chunks,
    native,
    ring,
    ring_attention,
    shard_sequence,
    unshard_sequence,
    zigzag_chunks,
    zigzag_positions,
)
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import tensor_parallel_by_hand
from labsupport.plan.context import contiguous_pairs, ring_cost, zigzag_pairs
from labsupport.train.proof import prove_equal
from labsupport.train.proof_run import PROOF_MODEL

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [  # batch, heads, kv_heads, tokens of a chunk, head_dim
    (2, 4, 2, 3, 8),
    (1, 3, 3, 1, 5),
    (3, 6, 1, 7, 4),
]
SPLITS = {"zig-zag": zigzag_chunks, "contiguous": contiguous_chunks}


def ring_of(size: int) -> dist.ProcessGroup | None:
    """The first ranks of the pool; None on the others. All ranks must call it."""
    group = dist.new_group(list(range(size)))
    return group if dist.get_rank() < size else None


def qkv(shape: Shape, *, num_chunks: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and a gradient of the output, the same on every rank."""
    batch, heads, kv_heads, chunk, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, h, num_chunks * chunk, head_dim, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def with_gradients(attend: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output, dq, dk, dv."""
    *given, grad_out = inputs
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = attend(*leaves)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def relative(one: Tensor, other: Tensor) -> float:
    scale = float(other.abs().max()) or 1.0  # one token alone: softmax is 1, and dq, dk are 0
    return float((one.double() - other.double()).abs().max()) / scale


# ---- one layer ---------------------------------------------------------------------------------


def differences(size: int, split_name: str) -> list[float]:
    """Of output, dq, dk and dv from full attention, for all shapes, on one rank of a ring."""
    group, split = ring_of(size), SPLITS[split_name]
    if group is None:
        return []
    rank, found = dist.get_rank(group), []
    for shape in SHAPES:
        inputs = qkv(shape, num_chunks=size * len(split(rank, size)))
        cut = partial(shard_sequence, rank=rank, world_size=size, split=split, dim=-2)
        mine = with_gradients(partial(ring_attention, group=group, split=split), *map(cut, inputs))
        whole = with_gradients(causal_attention, *inputs)
        found += [relative(a, cut(b)) for a, b in zip(mine, whole, strict=True)]
    return found


@pytest.mark.parametrize("split_name", SPLITS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_full_attention(four: Ranks, size: int, split_name: str) -> None:
    found = four.run(differences, size, split_name)
    assert [len(each) for each in found] == [12] * size + [0] * (4 - size)
    assert max(map(max, found[:size])) < 1e-5


def bf16_errors() -> list[tuple[float, float]]:
    """Distance from fp32 of the ring and of torch's own attention, both given bf16."""
    group, (rank, size) = ring_of(2), (dist.get_rank(), 2)
    assert group is not None
    inputs = qkv((2, 4, 2, 16, 8), num_chunks=4, dtype=torch.bfloat16)
    cut = partial(shard_sequence, rank=rank, world_size=size, dim=-2)
    exact = with_gradients(causal_attention, *(x.float() for x in inputs))
    usual = with_gradients(causal_attention, *inputs)
    mine = with_gradients(partial(ring_attention, group=group), *map(cut, inputs))
    assert all(x.dtype == torch.bfloat16 for x in mine)
    return [
        (relative(a, cut(e)), relative(cut(u), cut(e)))
        for a, u, e in zip(mine, usual, exact, strict=True)
    ]


def test_bf16_is_as_exact_as_in_one_process(two: Ranks) -> None:
    for errors in two.run(bf16_errors):
        for mine, usual in errors:
            assert mine < 1.5 * usual + 2**-9


def odd_number_of_tokens() -> None:
    q = torch.randn(1, 2, 5, 4)
    assert dist.group.WORLD is not None
    ring_attention(q, q, q, group=dist.group.WORLD)


def test_chunks_must_be_equal(two: Ranks) -> None:
    with pytest.raises(Exception, match="5 tokens on this rank must be a multiple of its 2 chunks"):
        two.run(odd_number_of_tokens)


# ---- what it costs: counted against the plan -----------------------------------------------------


def sent_by_layer(dtype: torch.dtype) -> list[tuple[int, int, int, set[int]]]:
    """Bytes forward and backward, messages, and to which rank, of rings of 1 to 4 ranks."""
    found = []
    for size in (1, 2, 3, 4):
        group = ring_of(size)
        if group is None:
            continue
        rank = dist.get_rank(group)
        shape = (2, PROOF_MODEL.num_heads, PROOF_MODEL.num_kv_heads, 4, PROOF_MODEL.head_dim)
        *given, grad_out = (
            shard_sequence(x, rank, size, dim=-2)
            for x in qkv(shape, num_chunks=2 * size, dtype=dtype)
        )
        leaves = [x.requires_grad_() for x in given]
        with count_sent_bytes() as sent:
            out = ring_attention(*leaves, group=group)
            forward = sent.total_bytes
            out.backward(grad_out)
        backward = sent.total_bytes - forward
        found.append((forward, backward, sent.messages, set(sent.by_destination)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_sent_are_those_of_the_plan(four: Ranks, dtype: torch.dtype) -> None:
    for rank, rings in enumerate(four.run(sent_by_layer, dtype)):
        sizes = range(max(1, rank + 1), 5)
        for size, (forward, backward, messages, to) in zip(sizes, rings, strict=True):
            plan = ring_cost(
                PROOF_MODEL, context_parallel_size=size, batch_size=2, seq_len=8 * size,
                element_bytes=dtype.itemsize,
            )  # fmt: skip
            assert (forward, backward) == (plan.forward_sent_bytes, plan.backward_sent_bytes)
            assert messages == (3 * size - 2 if size > 1 else 0)
            assert to == ({(rank + 1) % size} if size > 1 else set())


def computed_scores(split_name: str) -> int:
    """Scores that this rank computes for a head, in the forward pass."""
    group, (rank, size), split = ring_of(4), (dist.get_rank(), 4), SPLITS[split_name]
    assert group is not None
    counted: list[Tensor] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        counted.append(scores(*args, **kwargs))
        return counted[-1]

    scores = ring.scores  # type: ignore[attr-defined]
    with patch.object(ring, "scores", noted):
        q, k, v, _ = qkv((1, 1, 1, 6 // len(split(0, 4)), 4), num_chunks=4 * len(split(0, 4)))
        cut = partial(shard_sequence, rank=rank, world_size=size, split=split, dim=-2)
        ring_attention(cut(q), cut(k), cut(v), group=group, split=split)
    return sum(block.numel() for block in counted)


def test_zigzag_gives_all_ranks_the_same_work(four: Ranks) -> None:
    contiguous = four.run(computed_scores, "contiguous")
    assert contiguous == list(contiguous_pairs(24, context_parallel_size=4))
    assert max(contiguous) == 4 * min(contiguous)
    assert four.run(computed_scores, "zig-zag") == list(zigzag_pairs(24, context_parallel_size=4))


LONG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2
)


def memory_of_a_layer() -> list[tuple[int, int]]:
    """Bytes kept for the backward pass, and the peak of both passes, in rings of 1, 2, 4 ranks."""
    found = []
    for size in (1, 2, 4):
        group = ring_of(size)
        if group is None:
            continue
        whole = qkv((1, 4, 2, 1024 // (2 * size), LONG.head_dim), num_chunks=2 * size)
        mine = [shard_sequence(x, dist.get_rank(group), size, dim=-2) for x in whole]
        *leaves, grad_out = (x.requires_grad_() for x in mine)
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.data_ptr()] = x.numel() * x.element_size()
            return x

        with profile(profile_memory=True) as profiler:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = ring_attention(*leaves, group=group)
            out.backward(grad_out.detach())
        events = profiler.profiler.kineto_results.events()
        held = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        found.append((sum(kept.values()), peak))
    return found


def test_memory_of_a_rank_falls_with_the_ring(four: Ranks) -> None:
    measured = four.run(memory_of_a_layer)[0]
    for size, (kept, _) in zip((1, 2, 4), measured, strict=True):
        plan = ring_cost(LONG, context_parallel_size=size, batch_size=1, seq_len=1024)
        assert kept == plan.kept_bytes
    peaks = [peak for _, peak in measured]
    assert peaks[1] < peaks[0] / 2
    assert peaks[2] < peaks[1] / 2


# ---- which tokens --------------------------------------------------------------------------------


def test_zigzag_pairs_an_early_and_a_late_chunk() -> None:
    assert [zigzag_chunks(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert zigzag_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("split", SPLITS.values())
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_all_ranks_are_the_whole(size: int, split: Any) -> None:
    tokens = torch.arange(2 * 60).view(2, 60)
    parts = [shard_sequence(tokens, rank, size, split=split) for rank in range(size)]
    assert all(part.shape == (2, 60 // size) for part in parts)
    assert torch.equal(unshard_sequence(parts, split=split), tokens)
    turned = [part.T for part in parts]
    assert torch.equal(unshard_sequence(turned, split=split, dim=0), tokens.T)


@pytest.mark.parametrize(("seq_len", "works"), [(20, 16), (7, 8), (0, 8)])
def test_a_length_that_does_not_divide_is_refused(seq_len: int, works: int) -> None:
    with pytest.raises(ValueError, match=rf"seq_len={seq_len} .* multiple of 8.* {works} works"):
        shard_sequence(torch.zeros(1, seq_len), 0, 4)


# ---- whole models --------------------------------------------------------------------------------


def on_a_ring_of_four(model: Llama, layout: Layout) -> Any:
    assert layout.mesh is not None
    return data_parallel(context_parallel(model, layout.mesh["cp"]), group=layout.loss_group)


def split_by_hand_and_sharded(model: Llama, layout: Layout) -> Any:
    assert layout.mesh is not None
    split = tensor_parallel_by_hand(model, layout.mesh["tp"])
    return fully_sharded(context_parallel(split, layout.mesh["cp"]), mesh=layout.fsdp_mesh)


@pytest.mark.parametrize(
    ("wrap", "tp", "cp", "sharding"),
    [(on_a_ring_of_four, 1, 4, "ddp"), (split_by_hand_and_sharded, 2, 2, "fsdp")],
)
def test_four_ranks(four: Ranks, wrap: Any, tp: int, cp: int, sharding: Any) -> None:
    """Further axes, types and modes of recomputation: test_parity_shards.py."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp, context_parallel_size=cp, data_parallel_sharding=sharding
    )
    proof = prove_equal(four, wrap, parallel=parallel)
    assert proof.is_equal, proof


IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def bytes_of_a_step(recompute: str, compute_dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Sent in the forward and in the backward pass of a model of two layers."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = context_parallel(Llama(PROOF_MODEL), mesh)
    checkpoint_activations(model, Recompute.parse(recompute))
    ids, labels = (shard_sequence(x, rank, 2) for x in (IDS, IDS.roll(-1, dims=1)))
    autocast = torch.autocast("cpu", compute_dtype) if compute_dtype else nullcontext()
    with count_sent_bytes() as sent:
        with autocast:
            loss = token_loss(model(ids, positions=zigzag_positions(16, rank, 2)), labels).sum
        forward = sent.total_bytes
        loss.backward()
    return forward, sent.total_bytes - forward


def test_selective_recomputation_keeps_what_came_round(two: Ranks) -> None:
    """Full checkpointing goes round once more in the backward pass, selective does not."""
    (forward, backward), *_ = two.run(bytes_of_a_step, "none")
    assert two.run(bytes_of_a_step, "selective") == [(forward, backward)] * 2
    assert two.run(bytes_of_a_step, "full") == [(forward, backward + forward)] * 2


def test_under_autocast_narrow_numbers_travel(two: Ranks) -> None:
    (forward, _), *_ = two.run(bytes_of_a_step, "none")
    for narrow, _ in two.run(bytes_of_a_step, "none", torch.bfloat16):
        assert narrow * 2 == forward


def contiguous_logits() -> tuple[Tensor, Tensor]:
    """This rank's logits of a model whose ranks take one piece each, and those of one process."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    cut = partial(shard_sequence, rank=rank, world_size=2, split=contiguous_chunks)
    model = context_parallel(Llama(PROOF_MODEL), mesh, split=contiguous_chunks)
    with torch.no_grad():
        mine = model(cut(IDS), positions=cut(torch.arange(16)))
        return mine, cut(Llama(PROOF_MODEL)(IDS), dim=1)


def test_a_contiguous_model(two: Ranks) -> None:
    for mine, whole in two.run(contiguous_logits):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)


def without_positions() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    context_parallel(Llama(PROOF_MODEL), mesh)(shard_sequence(IDS, dist.get_rank(), 2))


def test_a_model_asks_where_its_tokens_stand(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"needs the positions .* positions=zigzag_positions\("):
        two.run(without_positions)


def test_shapes_are_known_without_memory_or_ranks() -> None:
    q, k = (torch.empty(2, heads, 6, 5, device="meta") for heads in (4, 2))
    out, log_sum = ring.RING_FORWARD(q, k, k, "no group", [0, 1])
    assert (out.shape, log_sum.shape) == (q.shape, (2, 2, 2, 6))


# ---- torch's own ---------------------------------------------------------------------------------


def native_on_the_cpu() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    with native.native_context_parallel(mesh, [IDS]):
        raise AssertionError("it should have been refused")


def test_torchs_ring_is_refused_on_cpus_with_the_reason(two: Ranks) -> None:
    with pytest.raises(Exception, match=r"ValueError.* no rule for the attention operator of CPUs"):
        two.run(native_on_the_cpu)
