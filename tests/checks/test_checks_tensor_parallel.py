"""The checks of notebook 08: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.nn import functional as F

from labsupport import Ranks
from labsupport.checks import tensor_parallel as check
from labsupport.config import ModelConfig

TINY = ModelConfig.named("tiny")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, threads_per_rank=1) as pool:
        yield pool


def good_layer(x: Any, a: Any, b: Any, f: Any, g: Any) -> Any:
    return g(F.silu(f(x) @ a) @ b)


def test_place_f_and_g(ranks: Ranks) -> None:
    def stub(x: Any, a: Any, b: Any, f: Any, g: Any) -> Any: ...

    assert check.place_f_and_g(stub, ranks).status == "blank"
    assert check.place_f_and_g(good_layer, ranks).is_right
    without_g = check.place_f_and_g(lambda x, a, b, f, g: F.silu(f(x) @ a) @ b, ranks)
    assert "a part of a sum" in without_g.hint
    without_f = check.place_f_and_g(lambda x, a, b, f, g: g(F.silu(x @ a) @ b), ranks)
    assert "came back through its own columns" in without_f.hint
    twice = check.place_f_and_g(lambda x, a, b, f, g: g(F.silu(f(f(x)) @ a) @ b), ranks)
    assert "2 times too large" in twice.hint
    behind = check.place_f_and_g(lambda x, a, b, f, g: g(f(F.silu(f(x) @ a) @ b)), ranks)
    assert "2 times too large" in behind.hint
    two_sums = check.place_f_and_g(lambda x, a, b, f, g: g(g(F.silu(f(x) @ a) @ b)), ranks)
    assert "the result is 2 times too large" in two_sums.hint
    assert "TypeError" in check.place_f_and_g(lambda x: x, ranks).hint


def test_three_ranks() -> None:
    good = replace(TINY, hidden_size=96, num_heads=3, num_kv_heads=3)
    assert check.three_ranks(...).status == "blank"
    assert check.three_ranks(good).is_right
    assert "num_heads=4" in check.three_ranks(TINY).hint
    shared = replace(TINY, hidden_size=192, num_heads=6)
    assert "num_kv_heads=2" in check.three_ranks(shared).hint
    assert "ModelConfig is wanted" in check.three_ranks(3).hint
    assert "stay below" in check.three_ranks(ModelConfig.named("125m")).hint


def good_embed(input_ids: Any, rows: Any, first: int, g: Any) -> Any:
    row = input_ids - first
    strange = (row < 0) | (row >= len(rows))
    found = F.embedding(row.masked_fill(strange, 0), rows)
    return g(found.masked_fill(strange.unsqueeze(-1), 0))


def test_uneven_vocabulary(ranks: Ranks) -> None:
    def clamped(input_ids: Any, rows: Any, first: int, g: Any) -> Any:
        return g(F.embedding((input_ids - first).clamp(0, len(rows) - 1), rows))

    def even(input_ids: Any, rows: Any, first: int, g: Any) -> Any:
        return good_embed(input_ids, rows, first // 26 * len(rows), g)

    assert check.uneven_vocabulary(..., ranks).status == "blank"
    assert check.uneven_vocabulary(good_embed, ranks).is_right
    assert "It must add nothing" in check.uneven_vocabulary(clamped, ranks).hint
    assert "not the table's rows" in check.uneven_vocabulary(even, ranks).hint
    alone = check.uneven_vocabulary(
        lambda ids, rows, first, g: good_embed(ids, rows, first, lambda part: part), ranks
    )
    assert "added up" in alone.hint


def test_largest_size() -> None:
    assert check.largest_size(...).status == "blank"
    assert check.largest_size(4).is_right
    assert "NVLink 4" in check.largest_size(16).hint
    assert "too small" in check.largest_size(1).hint


def test_balanced_split(ranks: Ranks) -> None:
    def stub(rank: int, world_size: int) -> Any:
        return ...

    assert check.balanced_split(stub, ranks).status == "blank"
    assert check.balanced_split(lambda rank, n: (rank, 2 * n - 1 - rank), ranks).is_right
    in_order = check.balanced_split(lambda rank, n: (2 * rank, 2 * rank + 1), ranks)
    assert "25%, 75% of the work" in in_order.hint
    assert "% of the work" in check.balanced_split(lambda rank, n: (rank, rank + n), ranks).hint
    assert "wanted once" in check.balanced_split(lambda rank, n: (rank, rank + 1), ranks).hint
