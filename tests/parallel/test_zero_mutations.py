"""Broken on purpose: each mistake of a ZeRO stage makes the proof of equality fail.

The mistakes are made on the ranks, one at a time, by replacing a function of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from labsupport import Ranks
from labsupport.config import ModelConfig
from labsupport.parallel.layout import Layout
from labsupport.parallel.zero import moments, zero1, zero2, zero3
from labsupport.parallel.zero.shards import Piece
from labsupport.parallel.zero.stage1 import Zero1
from labsupport.train import step as step_module
from labsupport.train.proof import RankProof, compare
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, train_alone, train_in

Mistake = Callable[[], AbstractContextManager[Any]]
Found = dict[tuple[str, str], RankProof]
STAGES: dict[str, Any] = {"zero1": zero1, "zero2": zero2, "zero3": zero3}
FEW_ROWS = replace(PROOF_MODEL, num_kv_heads=1, head_dim=2)
"""k and v have 2 rows: fewer than 4 ranks."""

right_exchange, right_gather = Zero1.exchange, Zero1.gather


def prove_each(mistakes: Sequence[Mistake], stages: Sequence[str], model: ModelConfig) -> Found:
    """On a rank: the proofs with each mistake in the code, against one run of the oracle."""
    layout = Layout.of_group(dist.group.WORLD)
    case: dict[str, Any] = {"model": model, "config": PROOF_CONFIG, "steps": 2}
    oracle, found = train_alone(dp_size=layout.dp_size, **case), {}
    for mistake, stage in product(mistakes, stages):
        with mistake():
            run = train_in(layout, STAGES[stage], **case)
        found[mistake.__name__, stage] = compare(run, oracle, layout=layout)
    return found


# ---- the mistakes ------------------------------------------------------------------------------


def kept_at_home(self: Zero1, piece: Piece) -> None:
    gradient = piece.gradient_to_send().div_(self.num_ranks)
    piece.received = piece.own_rows(gradient).clone()


def one_reduce_scatter_is_skipped() -> AbstractContextManager[Any]:
    def exchange(self: Zero1, piece: Piece) -> None:
        (kept_at_home if piece is self.pieces[2] else right_exchange)(self, piece)

    return patch.object(Zero1, "exchange", exchange)


def small_ones_are_not_reduced() -> AbstractContextManager[Any]:
    def exchange(self: Zero1, piece: Piece) -> None:
        (right_exchange if piece.is_split else kept_at_home)(self, piece)

    return patch.object(Zero1, "exchange", exchange)


def sums_are_not_divided() -> AbstractContextManager[Any]:
    def exchange(self: Zero1, piece: Piece) -> None:
        with patch.object(self, "num_ranks", 1):
            right_exchange(self, piece)

    return patch.object(Zero1, "exchange", exchange)


def shards_come_in_the_wrong_order() -> AbstractContextManager[Any]:
    def gather(self: Zero1, piece: Piece) -> None:
        right_gather(self, piece)
        if piece.is_split:
            piece.buffer.copy_(piece.buffer.roll(piece.rows_per_rank, dims=0))

    return patch.object(Zero1, "gather", gather)


def no_all_gather_after_the_step() -> AbstractContextManager[Any]:
    return patch.object(Piece, "may_have_changed", lambda self: False)


def no_broadcast() -> AbstractContextManager[Any]:
    return patch.object(moments, "send_first_weights", lambda model, group: None)


def no_sync_forgotten() -> AbstractContextManager[Any]:
    return patch.object(step_module, "_synchronised", lambda model, *, now: nullcontext())


# ---- each is found -----------------------------------------------------------------------------


def test_every_stage(two: Ranks) -> None:
    mistakes = [
        one_reduce_scatter_is_skipped,
        sums_are_not_divided,
        shards_come_in_the_wrong_order,
        no_broadcast,
    ]
    for found in two.run(prove_each, mistakes, list(STAGES), PROOF_MODEL):
        assert len(found) == len(mistakes) * len(STAGES)
        assert not {case for case, proof in found.items() if proof.is_equal}


def test_weights_of_before_the_step(two: Ranks) -> None:
    stages = ["zero1", "zero2"]
    for found in two.run(prove_each, [no_all_gather_after_the_step], stages, PROOF_MODEL):
        assert all(proof.loss > 1e-5 for proof in found.values())  # from the second step on


def test_parameters_with_few_rows(four: Ranks) -> None:
    mistakes = [nullcontext, small_ones_are_not_reduced]
    for found in four.run(prove_each, mistakes, list(STAGES), FEW_ROWS):
        assert {mistake for (mistake, _), proof in found.items() if proof.is_equal} == {
            "nullcontext"
        }


def test_a_forgotten_no_sync_changes_no_number_but_sends_twice(two: Ranks) -> None:
    for found in two.run(prove_each, [no_sync_forgotten], list(STAGES), PROOF_MODEL):
        for proof in found.values():
            assert max(proof.loss, proof.grad_norm, proof.gradients, proof.weights) < 1e-5
            assert proof.exchanges == pytest.approx(2, rel=0.01)
            assert not proof.is_equal
