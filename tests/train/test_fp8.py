"""fp8: scales, rounding, the real product against the emulated one, gradients, names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from labsupport.config import ModelConfig
from labsupport.model import Llama
from labsupport.train.fp8 import (
    BACKWARD,
    FORWARD,
    Fp8Linear,
    multiply,
    put_fp8_linears_in,
    quantize,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_model(tied: bool = False) -> Llama:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    return Llama(ModelConfig(**sizes, **heads, tie_word_embeddings=tied))


@pytest.mark.parametrize(
    ("dtype", "largest", "half_step"), [(FORWARD, 448, 1 / 16), (BACKWARD, 57344, 1 / 8)]
)
def test_a_tensor_of_any_size_is_kept_to_half_a_step(
    dtype: torch.dtype, largest: float, half_step: float
) -> None:
    for size in (1e-20, 1.0, 1e20):
        x = draw(64) * size
        q = quantize(x, dtype)
        assert q.data.dtype is dtype
        assert q.data.float().abs().max() == largest
        large = x.abs() > x.abs().max() / 64  # what is far smaller has fewer digits left
        error = (q.dequantize() - x).abs() / x.abs()
        assert error[large].max() <= half_step


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    assert quantize(torch.zeros(3)).dequantize().tolist() == [0.0] * 3
    for poison in (float("nan"), float("inf")):
        assert quantize(torch.tensor([1.0, poison])).dequantize().isnan().any()


@pytest.mark.parametrize("sizes", [(32, 16, 48), (5, 3, 7), (1, 17, 1)])
def test_the_real_product_equals_the_emulated_one(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes  # also sizes that the matrix units do not take
    for dtype in (FORWARD, BACKWARD):
        a, b = quantize(draw(m, k), dtype), quantize(draw(n, k, seed=1))
        for out_dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)):
            real = multiply(a, b, out_dtype=out_dtype, emulated=False)
            same = multiply(a, b, out_dtype=out_dtype, emulated=True)
            assert real.shape == (m, n)
            assert real.dtype is out_dtype
            torch.testing.assert_close(real, same, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("emulated", [True, False])
def test_output_and_gradients_are_those_of_the_rounded_tensors(emulated: bool) -> None:
    linear = Fp8Linear(32, 16)
    linear.emulated = emulated
    x = draw(2, 5, 32).requires_grad_()
    y = linear(x)
    upstream = draw(2, 5, 16, seed=1)
    y.backward(upstream)
    assert linear.weight.grad is not None
    rounded_x, rounded_w = quantize(x).dequantize(), quantize(linear.weight).dequantize()
    rounded_g = quantize(upstream, BACKWARD).dequantize()
    bias = linear.bias.detach()
    torch.testing.assert_close(y, F.linear(rounded_x, rounded_w, bias))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, rounded_g @ rounded_w)
    by_hand = rounded_g.flatten(0, 1).t() @ rounded_x.flatten(0, 1)
    torch.testing.assert_close(linear.weight.grad, by_hand)


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_get_fp8_and_nothing_is_renamed(tied: bool) -> None:
    model = small_model(tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    owned = {id(p) for p in model.parameters()}
    put_fp8_linears_in(model, emulated=True)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {id(p) for p in model.parameters()} == owned  # an optimizer made before still works
    narrow = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(narrow) == 2 * 7
    assert not isinstance(model.lm_head, Fp8Linear)


def test_under_autocast_results_are_bf16_and_gradients_fp32() -> None:
    linear = Fp8Linear(32, 16, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(draw(4, 32))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype is torch.float32


def test_the_eight_bit_copies_are_what_is_kept_for_the_backward_pass() -> None:
    linear = Fp8Linear(32, 16, bias=False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(draw(8, 32).requires_grad_())
    assert sum(t.nbytes for t in kept) == 8 * 32 + 16 * 32 + 2 * 4  # two tensors, two scales
