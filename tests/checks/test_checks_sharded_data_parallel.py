"""The checks of notebook 07: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from labsupport import Ranks
from labsupport.checks import sharded_data_parallel as check


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, threads_per_rank=1) as pool:
        yield pool


def good_most(stage: str, num_ranks: int, device_bytes: float) -> float:
    divided = {"ddp": 0, "zero1": 8, "zero2": 12, "zero3": 16}[stage]
    return device_bytes / (16 - divided + divided / num_ranks)


def test_largest_model() -> None:
    assert check.largest_model(...).status == "blank"
    assert check.largest_model(lambda stage, n, size: ...).status == "blank"
    assert check.largest_model(good_most).is_right
    all_divided = check.largest_model(lambda stage, n, size: size * n / 16)
    assert "this stage does not" in all_divided.hint
    assert "with 'ddp', 8, 8e+10" in all_divided.hint
    assert "only in ddp" in check.largest_model(lambda stage, n, size: size / 16).hint
    assert "billions" in check.largest_model(lambda *case: good_most(*case) / 1e9).hint
    assert "KeyError" in check.largest_model(lambda stage, n, size: {}[stage]).hint


def test_not_divided() -> None:
    assert check.not_divided((..., ...)).status == "blank"
    states = 15.4 / (1 / 8 - 1 / 128)
    assert check.not_divided((states, 82.4 - states / 8)).is_right
    assert "not nothing" in check.not_divided((8 * 15.4, 67.0)).hint
    assert "comes second" in check.not_divided((66.0, 131.0)).hint
    assert check.not_divided((states, 80.0)).hint == "rest: too large"
    assert "two numbers" in check.not_divided(5).hint


def good_units(model: Any, blocks_per_unit: int) -> None:
    blocks = list(model.model.layers)
    for first in range(0, len(blocks), blocks_per_unit):
        fully_shard(blocks[first : first + blocks_per_unit])
    fully_shard(model)


def without_root(model: Any, blocks_per_unit: int) -> None:
    for block in model.model.layers:
        fully_shard(block)


def one_each(model: Any, blocks_per_unit: int) -> None:
    without_root(model, blocks_per_unit)
    fully_shard(model)


def root_first(model: Any, blocks_per_unit: int) -> None:
    fully_shard(model)
    without_root(model, blocks_per_unit)


def sliced(model: Any, blocks_per_unit: int) -> None:
    fully_shard(model.model.layers[:blocks_per_unit])


def every_other(model: Any, blocks_per_unit: int) -> None:
    blocks = list(model.model.layers)
    num_units = len(blocks) // blocks_per_unit
    for first in range(num_units):
        fully_shard(blocks[first::num_units])
    fully_shard(model)


def test_units(ranks: Ranks) -> None:
    assert check.units(..., ranks).status == "blank"
    assert check.units(lambda model, k: 1 + k, ranks).status == "blank"
    assert check.units(good_units, ranks).is_right
    assert "who shards the root" in check.units(without_root, ranks).hint
    assert "4 units and the root; 2 are asked" in check.units(one_each, ranks).hint
    assert "the root comes last" in check.units(root_first, ranks).hint
    assert "make it a list" in check.units(sliced, ranks).hint
    assert "not neighbours" in check.units(every_other, ranks).hint
    only_root = check.units(lambda model, k: fully_shard(model) and None, ranks)
    assert "the root last" in only_root.hint
    assert "ZeroDivisionError" in check.units(lambda model, k: 1 / 0, ranks).hint


def good_hsdp(num_params: int, num_ranks: int, num_replicas: int) -> tuple[float, float]:
    group = num_ranks // num_replicas
    across = 2 * (num_replicas - 1) / num_replicas * 4 * num_params / group
    return 16 * num_params / group, across


def test_hsdp_bytes() -> None:
    assert check.hsdp_bytes(...).status == "blank"
    assert check.hsdp_bytes(good_hsdp).is_right
    assert "how many ranks" in check.hsdp_bytes(lambda p, n, r: (16 * p / n, 4 * p)).hint
    swapped = check.hsdp_bytes(lambda p, n, r: good_hsdp(p, n, r)[::-1])
    assert "it comes second" in swapped.hint
    whole = check.hsdp_bytes(lambda p, n, r: (16 * p * r / n, 8 * (r - 1) / r * p))
    assert "the reduce-scatter inside the group" in whole.hint
    assert "two numbers" in check.hsdp_bytes(lambda p, n, r: 16 * p * r / n).hint
    assert "ZeroDivisionError" in check.hsdp_bytes(lambda p, n, r: p / 0).hint


def test_offload() -> None:
    assert check.offload(...).status == "blank"
    assert check.offload(lambda n, link, flops: 2 * flops / (n * link)).is_right
    assert "has a shard only" in check.offload(lambda n, link, flops: 2 * flops / link).hint
    once = check.offload(lambda n, link, flops: 2 * flops / (3 * n * link))
    assert "three copies" in once.hint
    assert "upside down" in check.offload(lambda n, link, flops: n * link / (2 * flops)).hint
