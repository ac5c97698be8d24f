"""In which types does a training step compute, and in which does it keep its numbers?

    weight (fp32) --cast--> matrix product (bf16) --> gradient (fp32) --> optimizer step (fp32)

    precision = Precision.named("bf16")
    model = precision.prepare(Llama(config))            # casts the weights, or puts fp8 products in
    with precision.autocast():
        logits = model(input_ids)

| name | weights, gradients, moments | matrix products | against overflow and underflow |
|---|---|---|---|
| fp32 | fp32 | fp32 | |
| bf16 | fp32 (master weights) | bf16 | the range is fp32's |
| bf16-pure | bf16 | bf16 | the range is fp32's, but small updates vanish |
| fp16 | fp32 (master weights) | fp16 | the loss is scaled: `grad_scaler` |
| fp8 | fp32 (master weights) | fp8 in the blocks, bf16 elsewhere | a scale for every tensor |
| fp8-emulated | as fp8 | rounded to fp8, multiplied in fp32 | the same; says nothing on speed |
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self, get_args

import torch
from torch import nn

from labsupport import devices
from labsupport.config import MixedPrecision
from labsupport.train.fp8 import put_fp8_linears_in

FP8_CAPABILITY = (8, 9)
"""The first GPUs with fp8 matrix units: Ada (8.9), then Hopper (9.0)."""
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {  # parameters, computation
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "bf16-pure": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp8": (torch.float32, torch.bfloat16),
    "fp8-emulated": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A recipe: what is cast, where, and whether the loss is scaled. Make it with `named`."""

    name: MixedPrecision
    device: str
    """Type of the device it is for: cpu or cuda."""
    parameter_dtype: torch.dtype
    """Of the weights that the optimizer changes, their gradients and its moments."""
    compute_dtype: torch.dtype
    """Of the matrix products; under fp8 of those that stay out of it."""

    @classmethod
    def named(cls, name: MixedPrecision, *, device: str = "cpu") -> Self:
        """The recipe called `name` on `device` ("cpu", "cuda", "cuda:1").

        Raises ValueError for an unknown name, and for fp8 where no matrix unit computes in it.
        """
        if name not in _DTYPES:
            names = ", ".join(get_args(MixedPrecision))
            raise ValueError(f"mixed_precision={name!r} is unknown; choose one of {names}")
        if name == "fp8":
            _check_fp8_units(device)
        parameters, compute = _DTYPES[name]
        return cls(
            name=name,
            device=torch.device(device).type,
            parameter_dtype=parameters,
            compute_dtype=compute,
        )

    @property
    def is_emulated(self) -> bool:
        """Rounded as another machine would: results are to be labelled `emulated`."""
        return self.name == "fp8-emulated"

    def autocast(self) -> AbstractContextManager[object]:
        """For the forward pass and the loss; torch chooses the operators that compute narrow."""
        if self.compute_dtype == self.parameter_dtype:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.compute_dtype)

    def grad_scaler(
        self, *, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> torch.amp.GradScaler | None:
        """fp16 only: what scales the loss, halves on overflow, doubles after `growth_interval`."""
        if self.name != "fp16":
            return None
        return torch.amp.GradScaler(
            self.device, init_scale=init_scale, growth_interval=growth_interval
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Cast the weights or put fp8 products in, in place; names stay as they are.

        Call it before the optimizer is built and before the model is wrapped or sharded.
        """
        model.to(self.parameter_dtype)
        if self.name in ("fp8", "fp8-emulated"):
            put_fp8_linears_in(model, emulated=self.is_emulated)
        return model


def _check_fp8_units(device: str) -> None:
    capability = devices.compute_capability(device)
    if capability is None or capability < FP8_CAPABILITY:
        found = "no GPU" if capability is None else "compute capability {}.{}".format(*capability)
        raise ValueError(
            f"mixed_precision='fp8' needs a GPU of compute capability 8.9 or more, and {device!r} "
            f"has {found}; 'fp8-emulated' rounds as fp8 does and runs anywhere"
        )
