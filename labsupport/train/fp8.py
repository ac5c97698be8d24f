"""What does a matrix product in 8 bits need? One scale for each tensor.

    scale = max |x| / largest number of the type        q = round(x / scale), 8 bits
    y     = (q_x · q_wᵀ) · scale_x · scale_w             products in fp8, sums in fp32

    model = put_fp8_linears_in(Llama(config), emulated=True)
    q = quantize(torch.randn(16, 32))                   # q.data float8_e4m3fn, q.scale fp32

Forward in e4m3 (4 bits of exponent, 3 of mantissa: finer), backward the gradient in e5m2 (wider).
Weights stay fp32 and are rounded anew in each step; embedding and lm_head stay out of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
BLOCK = 16
"""The matrix units take sizes that are multiples of this."""
_KEPT_WIDE = "lm_head"


class Quantized(NamedTuple):
    """A tensor as 8-bit numbers and the fp32 factor that gives back its size."""

    data: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """What is left of the tensor, fp32."""
        return self.data.float() * self.scale


def quantize(x: Tensor, dtype: torch.dtype = FORWARD) -> Quantized:
    """Scale so that the largest |x| becomes the largest number of `dtype`, and round.

    Zeros stay zeros. A NaN or infinity makes all of it NaN, so that it is found later.
    """
    largest = torch.finfo(dtype).max
    scale = x.detach().abs().amax().float() / largest
    scale = torch.where(scale == 0, 1.0, scale)
    return Quantized((x.float() / scale).clamp(-largest, largest).to(dtype), scale)


def multiply(a: Quantized, b: Quantized, *, out_dtype: torch.dtype, emulated: bool) -> Tensor:
    """a · bᵀ of a (m, k) and b (n, k), summed in fp32, rounded once to `out_dtype`.

    On the matrix units through `torch._scaled_mm`; emulated: the same 8-bit numbers, widened.
    """
    if emulated:
        return ((a.data.float() @ b.data.float().t()) * (a.scale * b.scale)).to(out_dtype)
    (m, k), n = a.data.shape, len(b.data)
    left, right = _padded(a.data, 0, k), _padded(b.data, n, k)
    out = torch._scaled_mm(left, right.t(), a.scale, b.scale, out_dtype=out_dtype)
    return out[:m, :n]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Row-major, with zeros up to the next multiples of BLOCK."""
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    bits = x.contiguous().view(torch.uint8)  # all bits 0 is the number 0 in both types
    return (F.pad(bits, pad) if any(pad) else bits).view(x.dtype)


class _Fp8Product(torch.autograd.Function):
    """x (tokens, in) · weightᵀ (in, out); keeps 8-bit copies of both for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, out_dtype: torch.dtype, emulated: bool
    ) -> Tensor:
        q_x, q_weight = quantize(x), quantize(weight)
        ctx.save_for_backward(*q_x, *q_weight)
        ctx.dtypes, ctx.emulated = (x.dtype, weight.dtype), emulated
        return multiply(q_x, q_weight, out_dtype=out_dtype, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, scale_x, weight, scale_weight = ctx.saved_tensors
        g = quantize(grad, BACKWARD)
        columns = Quantized(g.data.t(), g.scale)
        x_dtype, weight_dtype = ctx.dtypes
        emulated = ctx.emulated
        grad_x = multiply(  # (tokens, out) · (out, in)
            g, Quantized(weight.t(), scale_weight), out_dtype=x_dtype, emulated=emulated
        )
        grad_weight = multiply(  # (out, tokens) · (tokens, in)
            columns, Quantized(x.t(), scale_x), out_dtype=weight_dtype, emulated=emulated
        )
        return grad_x, grad_weight, None, None


class Fp8Linear(nn.Linear):
    """nn.Linear whose three products (forward, gradient of x, of weight) are in 8 bits."""

    emulated: bool = True

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        narrow = torch.is_autocast_enabled(kind)
        out_dtype = torch.get_autocast_dtype(kind) if narrow else x.dtype
        with torch.autocast(kind, enabled=False):
            y: Tensor = _Fp8Product.apply(  # type: ignore[no-untyped-call]
                x.reshape(-1, self.in_features), self.weight, out_dtype, self.emulated
            )
        y = y.view(*x.shape[:-1], -1)  # (…, out)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def put_fp8_linears_in(model: nn.Module, *, emulated: bool) -> nn.Module:
    """Every nn.Linear but lm_head becomes an Fp8Linear with the same parameters, in place."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.rpartition(".")[2] == _KEPT_WIDE:
            continue
        with torch.device("meta"):
            narrow = Fp8Linear(module.in_features, module.out_features, bias=False)
        narrow.weight, narrow.bias = module.weight, module.bias
        narrow.emulated = emulated
        model.set_submodule(name, narrow)
    return model
