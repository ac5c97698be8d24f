"""The checks of notebook 04: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.checks import mixed_precision as check


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, threads_per_rank=1, device="cpu") as pool:
        yield pool


def test_lost_update() -> None:
    assert check.lost_update(..., ...).status == "blank"
    assert check.lost_update(1.0, 1e-3).is_right
    assert check.lost_update(torch.tensor(256.0), 0.5).is_right
    assert "0.0078125 apart" in check.lost_update(1.0, 0.01).hint
    assert "fp32 too" in check.lost_update(1.0, 1e-9).hint
    assert "neither 0" in check.lost_update(0.0, 1e-9).hint
    assert "bf16 has no 0.1" in check.lost_update(0.1, 1e-5).hint
    assert check.lost_update("one", []).status == "not yet"
    assert check.lost_update(float("nan"), 1.0).status == "not yet"
    assert "bf16 ends at" in check.lost_update(1e39, 1.0).hint
    assert check.lost_update(10**400, 1.0).status == "not yet"


def test_loss_scale() -> None:
    assert check.loss_scale(...).status == "blank"
    assert check.loss_scale(2**16).is_right
    assert check.loss_scale(2**27).is_right
    assert "overflows" in check.loss_scale(2**28).hint
    assert "rounded to 0" in check.loss_scale(1).hint
    assert "loses digits" in check.loss_scale(2**10).hint
    assert "power of two" in check.loss_scale(100_000).hint
    assert check.loss_scale("large").status == "not yet"
    assert check.loss_scale(-1).status == "not yet"
    assert check.loss_scale(10**400).status == "not yet"


def good_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def test_to_fp8() -> None:
    assert check.to_fp8(good_fp8).is_right
    assert check.to_fp8(...).status == "blank"
    assert check.to_fp8(lambda x: ...).status == "blank"
    unscaled = check.to_fp8(lambda x: (x.to(torch.float8_e4m3fn), 1.0)).hint
    assert "goes up to 448" in unscaled
    for_small = check.to_fp8(lambda x: ((x * 448 / 3.3).to(torch.float8_e4m3fn), 3.3 / 448))
    assert "cut off at 448" in for_small.hint
    turned = check.to_fp8(lambda x: (good_fp8(x)[0], 1 / good_fp8(x)[1]))
    assert "wrong way round" in turned.hint
    assert "float32" in check.to_fp8(lambda x: (x, 1.0)).hint
    assert "ZeroDivisionError" in check.to_fp8(lambda x: 1 / 0).hint
    assert "return data, scale" in check.to_fp8(lambda x: good_fp8(x)[0]).hint
    assert check.to_fp8(3).status == "not yet"


def test_to_fp8_by_the_largest_and_not_by_the_largest_magnitude() -> None:
    def signed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.max() / 448
        return (x / scale).to(torch.float8_e4m3fn), scale

    assert "may be negative" in check.to_fp8(signed).hint


def test_stays_in_fp32() -> None:
    right = {name: wanted for name, (wanted, _) in check.OPERATORS.items()}
    assert check.stays_in_fp32(right).is_right
    torch_names = {name: {"bf16": torch.bfloat16}.get(w, "float32") for name, w in right.items()}
    assert check.stays_in_fp32(torch_names).is_right
    assert check.stays_in_fp32({**right, "silu": ...}).status == "blank"
    assert "round 2" in check.stays_in_fp32({**right, "weight update": "bf16"}).hint
    assert "inside" in check.stays_in_fp32({**right, "matrix product": "fp32"}).hint
    assert "needs 'bf16' or 'fp32'" in check.stays_in_fp32({"silu": "bf16"}).hint
    assert check.stays_in_fp32("all").status == "not yet"


def good_reduce(tensor: torch.Tensor) -> torch.Tensor:
    n = dist.get_world_size()
    mine = tensor.bfloat16()
    arrived = torch.empty_like(mine)
    dist.all_to_all_single(arrived, mine)
    piece = arrived.view(n, -1).float().sum(0).bfloat16()
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, piece)
    return whole.float()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def narrow_sum(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.bfloat16()
    dist.all_reduce(narrow)
    return narrow.float()


def everything_to_everyone(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.bfloat16()
    arrived = [torch.empty_like(narrow) for _ in range(dist.get_world_size())]
    dist.all_gather(arrived, narrow)
    return torch.stack(arrived).float().sum(0)


def test_narrow_all_reduce(ranks: Ranks) -> None:
    assert check.narrow_all_reduce(good_reduce, ranks).is_right
    assert check.narrow_all_reduce(..., ranks).status == "blank"
    assert check.narrow_all_reduce(lambda tensor: None, ranks).status == "blank"
    assert "float32 travels" in check.narrow_all_reduce(wide, ranks).hint
    assert "made in fp32" in check.narrow_all_reduce(narrow_sum, ranks).hint
    assert "no byte is saved" in check.narrow_all_reduce(everything_to_everyone, ranks).hint
    stays_narrow = check.narrow_all_reduce(lambda tensor: good_reduce(tensor).bfloat16(), ranks)
    assert "return it in fp32" in stays_narrow.hint
    assert "does not get the sum" in check.narrow_all_reduce(lambda tensor: tensor, ranks).hint
    assert "does not get the sum" in check.narrow_all_reduce(lambda tensor: tensor[:3], ranks).hint
    assert "NameError" in check.narrow_all_reduce(lambda tensor: undefined, ranks).hint  # noqa: F821
    assert check.narrow_all_reduce(3, ranks).status == "not yet"
