"""Number formats by formula, against torch's own types."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.plan.number_formats import FORMATS

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_torchs(name: str) -> None:
    form, torchs = FORMATS[name], torch.finfo(DTYPES[name])
    assert form.bits == torchs.bits
    assert form.largest == torchs.max
    assert form.smallest_normal == torchs.smallest_normal
    assert form.spacing_at(1.0) == torchs.eps
    smallest = torch.tensor(form.smallest, dtype=torch.float64).to(DTYPES[name]).double()
    assert smallest.item() == form.smallest


@pytest.mark.parametrize("name", FORMATS)
@given(value=st.floats(-2, 2, width=16), scale=st.integers(-40, 20))
@settings(max_examples=200, deadline=None)
def test_rounding_is_torchs(name: str, value: float, scale: int) -> None:
    value = math.ldexp(value, scale)
    rounded = torch.tensor(value, dtype=torch.float32).to(DTYPES[name]).float().item()
    assert FORMATS[name].round(value) == rounded


@pytest.mark.parametrize("increment", [1e-4, 1e-3, 0.3, 0.25, 1.0])  # a power of 2 ends in a tie
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8 e4m3", "fp8 e5m2"])
def test_a_sum_stalls_where_it_is_said_to(name: str, increment: float) -> None:
    total = torch.zeros(()).to(DTYPES[name])
    small = torch.tensor(increment).to(DTYPES[name])
    for _ in range(5_000):
        total = (total.float() + small.float()).to(DTYPES[name])
    assert total.float().item() == FORMATS[name].stalls_at(increment)


def test_values_worked_by_hand() -> None:
    assert FORMATS["bf16"].stalls_at(1e-4) == 2.0**-5  # steps of 2^-12 there, half is 1.2e-4
    assert FORMATS["fp8 e4m3"].stalls_at(1e-4) == 0.0  # its smallest number is 2^-9
    assert FORMATS["fp16"].largest == 65504
    assert FORMATS["fp16"].round(65520) == math.inf
    assert FORMATS["fp8 e4m3"].neighbours(1.0, 2) == [0.875, 0.9375, 1.0, 1.125, 1.25]
    assert FORMATS["fp8 e4m3"].neighbours(0.0, 1) == [-(2.0**-9), 0.0, 2.0**-9]
    assert FORMATS["fp8 e4m3"].neighbours(1e9, 1) == [416, 448]
    assert FORMATS["fp8 e5m2"].neighbours(-1.0, 1) == [-1.25, -1.0, -0.875]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_errors_of_rounding_and_of_sums_are_those_of_random_numbers(name: str) -> None:
    form, dtype = FORMATS[name], DTYPES[name]
    generator = torch.Generator().manual_seed(0)
    terms = 1 + 0.3 * torch.randn(64, 20_000, generator=generator, dtype=torch.float64)
    rounded = terms.to(dtype).double()
    spread = torch.exp2(4 * torch.rand(20_000, generator=generator, dtype=torch.float64))
    one = ((spread.to(dtype).double() - spread) / spread).pow(2).mean().sqrt().item()
    assert one == pytest.approx(form.rounding_error, rel=0.05)
    for n in (2, 8, 64):
        total = torch.zeros(20_000, dtype=dtype)
        for term in rounded[:n]:
            total = (total.double() + term).to(dtype)
        exact = terms[:n].sum(0)
        error = ((total.double() - exact) / exact).pow(2).mean().sqrt().item()
        assert error == pytest.approx(form.sum_error(n), rel=0.35)
