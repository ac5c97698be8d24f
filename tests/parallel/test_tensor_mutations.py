"""Broken on purpose: each classic mistake of tensor parallelism makes the proof of equality fail.

The mistakes are made on the ranks, one at a time, by replacing a function of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labsupport import RankError, Ranks
from labsupport.config import ParallelConfig
from labsupport.model import Llama
from labsupport.parallel.layout import Layout
from labsupport.parallel.tensor import (
    by_hand,
    functions,
    layers,
    loss,
    native,
    tensor_parallel,
    tensor_parallel_by_hand,
)
from labsupport.train.proof import Proof, RankProof
from tests.parallel.test_tensor_by_hand import ONE_KV_HEAD, PROOF_MODEL, TIED, prove_with_own_loss

Mistake = Callable[[], AbstractContextManager[Any]]
PLAIN = ParallelConfig(tensor_parallel_size=2)
SEQUENCE = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)


def split(model: Llama, layout: Layout, *, recipe: Any = tensor_parallel_by_hand) -> Llama:
    assert layout.mesh is not None
    split_model: Llama = recipe(
        model, layout.mesh["tp"], sequence_parallel=layout.sequence_parallel
    )
    return split_model


def prove_with(mistake: Mistake, wrap: Any, case: dict[str, Any]) -> RankProof:
    """On a rank: the proof, with a mistake in the code."""
    with mistake():
        return prove_with_own_loss(wrap, **case)


def proof(
    ranks: Ranks, mistake: Mistake, *, wrap: Any = split, parallel: Any = PLAIN, model: Any = TIED
) -> Proof:
    case = {"parallel": parallel, "model": model}
    return Proof(tuple(ranks.run(prove_with, mistake, wrap, case)))


# ---- the mistakes ------------------------------------------------------------------------------


def f_does_not_add_gradients_up() -> AbstractContextManager[Any]:
    return patch.object(functions._CopyToRanks, "backward", lambda ctx, grad: (grad, None))


def g_does_not_add_parts_up() -> AbstractContextManager[Any]:
    return patch.object(
        functions._ReduceFromRanks, "forward", lambda ctx, part, group: part.clone()
    )


def g_adds_gradients_up_too() -> AbstractContextManager[Any]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return functions.all_reduced(grad, dist.group.WORLD), None

    return patch.object(functions._ReduceFromRanks, "backward", backward)


def own_piece(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def gather_only_cuts_gradients() -> AbstractContextManager[Any]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_piece(grad, ctx.group), None

    return patch.object(functions._GatherSequence, "backward", backward)


def scatter_only_cuts() -> AbstractContextManager[Any]:
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_piece(part, group)

    return patch.object(functions._ScatterSequence, "forward", forward)


def norm_gradients_stay_at_home() -> AbstractContextManager[Any]:
    """Each rank's norms have seen its tokens only."""

    def norm(whole: Any, mesh: Any, use: Any) -> Any:
        return layers.ParallelNorm(whole, mesh, use=by_hand._as_it_is)

    return patch.object(by_hand, "ParallelNorm", norm)


def shared_heads_gradients_stay_at_home() -> AbstractContextManager[Any]:
    return patch.object(layers, "copy_to_ranks", lambda weight, group: weight)


def every_rank_looks_up_the_first_rows() -> AbstractContextManager[Any]:
    return patch.object(layers, "first_entry", lambda vocab_size, group: 0)


def reduced_but(skipped: Any) -> AbstractContextManager[Any]:
    right = loss.all_reduced

    def wrong(x: Tensor, group: Any, *, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return x if op == skipped else right(x, group, op=op)

    return patch.object(loss, "all_reduced", wrong)


def loss_takes_its_own_maximum() -> AbstractContextManager[Any]:
    return reduced_but(dist.ReduceOp.MAX)


def loss_takes_its_own_sums() -> AbstractContextManager[Any]:
    return reduced_but(dist.ReduceOp.SUM)


def heads_dealt_out(model: Llama, layout: Layout) -> Llama:
    """Query heads go to the ranks in turn, as cards do; their keys and values as they should."""
    for block in model.model.layers:
        weight = block.self_attn.q_proj.weight.data  # type: ignore[union-attr]
        heads = weight.view(-1, layout.tp_size, model.config.head_dim, weight.shape[1])
        weight.copy_(heads.transpose(0, 1).reshape(weight.shape))
    return split(model, layout)


# ---- each is found -----------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [PLAIN, SEQUENCE])
def test_without_a_mistake_all_is_equal(two: Ranks, parallel: ParallelConfig) -> None:
    assert proof(two, nullcontext, parallel=parallel).is_equal


@pytest.mark.parametrize(
    "mistake",
    [
        f_does_not_add_gradients_up,
        g_does_not_add_parts_up,
        g_adds_gradients_up_too,
        every_rank_looks_up_the_first_rows,
        loss_takes_its_own_maximum,
        loss_takes_its_own_sums,
    ],
)
def test_tensor_parallel(two: Ranks, mistake: Mistake) -> None:
    found = proof(two, mistake)
    assert not found.is_equal
    assert "NO" in repr(found)


@pytest.mark.parametrize(
    "mistake",
    [f_does_not_add_gradients_up, gather_only_cuts_gradients, scatter_only_cuts],
)
def test_sequence_parallel(two: Ranks, mistake: Mistake) -> None:
    assert not proof(two, mistake, parallel=SEQUENCE).is_equal


def test_norms_under_sequence_parallel(two: Ranks) -> None:
    """The first loss is right: only gradients of norms differ, rank by rank."""
    for rank in proof(two, norm_gradients_stay_at_home, parallel=SEQUENCE).ranks:
        assert not rank.is_equal
        assert rank.gradients > 0.1
        assert rank.loss < 0.1


def test_shared_kv_heads(two: Ranks) -> None:
    assert proof(two, nullcontext, model=ONE_KV_HEAD).is_equal
    assert not proof(two, shared_heads_gradients_stay_at_home, model=ONE_KV_HEAD).is_equal


def test_shards_in_the_wrong_order_look_plausible(two: Ranks) -> None:
    for rank in proof(two, nullcontext, wrap=heads_dealt_out, model=PROOF_MODEL).ranks:
        assert rank.loss < 0.05
        assert not rank.is_equal
        assert rank.weights > 0.1


# ---- torch's, used wrongly ---------------------------------------------------------------------


def untied(model: Llama, layout: Layout) -> Llama:
    """As parallelize_module leaves them: two parameters that were one."""
    tied = split(model, layout, recipe=tensor_parallel)
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    return tied


def gradients_left_as_they_come() -> AbstractContextManager[Any]:
    return patch.object(native, "_place_gradients", lambda model, _: None)


def test_embeddings_that_parted(two: Ranks) -> None:
    assert not proof(two, nullcontext, wrap=untied, model=TIED).is_equal


def test_parts_of_a_gradient_are_not_taken_for_the_whole(two: Ranks) -> None:
    wrap = partial(split, recipe=tensor_parallel)
    with pytest.raises(RankError, match="a gradient was not reduced yet"):
        proof(two, gradients_left_as_they_come, wrap=wrap, parallel=SEQUENCE)
