"""Checks for the exercises of 04_mixed_precision: updates, loss scales, fp8, operators, reductions.

    from labsupport.checks import mixed_precision as check
    check.lost_update(1.0, 1e-3)

Two exercises write code: one is called on tensors of many sizes, one runs on the ranks given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.checks import Verdict, blank, is_blank, not_yet, right
from labsupport.plan.number_formats import FORMATS
from labsupport.ranks import RankError, Ranks

LARGEST_GRADIENT, SMALLEST_GRADIENT = 3e-4, 2e-9
NUMBERS = 4096
LARGEST_TRAFFIC = 4
"""In and out of collectives, as a multiple of the tensor: two halves of an all-reduce handle 3 and
1/n, a gather of everybody's whole tensor 1 and n."""
DEADLINE_S = 30.0
OPERATORS = {  # where each must compute, and what a wrong answer overlooks
    "matrix product": ("bf16", "its many sums are kept in fp32 inside; bf16 goes in and comes out"),
    "silu": ("bf16", "one number in, one out: a single rounding, nothing is added up"),
    "mean of squares in a norm": ("fp32", "thousands of terms are added: remember round 1"),
    "log-softmax and loss": ("fp32", "a sum over the vocabulary, and differences of large logits"),
    "weight update": ("fp32", "what is added is far smaller than the weight: remember round 2"),
}


def lost_update(weight: object, update: object) -> Verdict:
    """Exercise A: `weight + update` is `weight` in bf16, and is not in fp32."""
    if is_blank(weight) or is_blank(update):
        return blank()
    try:
        w, u = float(weight), float(update)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return not_yet("two numbers are wanted")
    if not (math.isfinite(w) and math.isfinite(u)) or w == 0 or u == 0:
        return not_yet("both must be finite, and neither 0: a weight of 0 has room for any update")
    wide, narrow = FORMATS["fp32"], FORMATS["bf16"]
    if max(abs(w), abs(w + u)) > narrow.largest:
        return not_yet(f"bf16 ends at {narrow.largest:.3g}; take smaller numbers")
    if narrow.round(w) != w:
        return not_yet(f"bf16 has no {w:g}; nearby it has {narrow.round(w):g}. Take that one")
    if narrow.round(w + u) != w:
        step = narrow.spacing_at(w)
        return not_yet(f"bf16 keeps this one: at {w:g} its numbers lie {step:g} apart")
    if wide.round(w + u) == w:
        return not_yet("this one is lost in fp32 too; find one that only bf16 loses")
    return right(f"half a step of bf16 at {w:g} is {narrow.spacing_at(w) / 2:g}")


def loss_scale(answer: object) -> Verdict:
    """Exercise B: a power of two that brings all gradients into fp16's normal numbers."""
    if is_blank(answer):
        return blank()
    try:
        scale = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return not_yet("a number is wanted")
    fp16 = FORMATS["fp16"]
    if not math.isfinite(scale) or scale <= 0:
        return not_yet("a finite number above 0 is wanted")
    if LARGEST_GRADIENT * scale > fp16.largest:
        return not_yet(f"the largest gradient becomes {LARGEST_GRADIENT * scale:.3g}: it overflows")
    if fp16.round(SMALLEST_GRADIENT * scale) == 0:
        return not_yet("the smallest gradient is still rounded to 0")
    if SMALLEST_GRADIENT * scale < fp16.smallest_normal:
        return not_yet(
            f"the smallest becomes {SMALLEST_GRADIENT * scale:.3g}: not 0, but below "
            f"{fp16.smallest_normal:.3g} fp16 loses digits"
        )
    if math.frexp(scale)[0] != 0.5:
        return not_yet("the range is right; take a power of two, which changes no digit")
    return right("a power of two moves the exponent and leaves every digit alone")


def to_fp8(answer: object) -> Verdict:
    """Exercise C: `to_fp8(x)` gives (8-bit tensor, scale) with data · scale ≈ x, for any size."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted; `def to_fp8(x): ...`")
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 1e4, 1e-6):
        x = torch.randn(256, generator=generator) * size
        x[7] = -5 * size  # the largest is a negative one
        try:
            given = answer(x.clone())
            if is_blank(given):
                return blank("The function still returns nothing: finish its last line.")
            if not isinstance(given, tuple | list) or len(given) != 2:
                return not_yet("two things are wanted: return data, scale")
            data, scale = given
            if data.dtype is not torch.float8_e4m3fn:
                return not_yet(f"the data are {data.dtype}; torch.float8_e4m3fn is wanted")
            hint = _fp8_hint(x, data.float(), float(scale))
        except Exception as error:  # whatever the learner's code raises is told, not raised
            return not_yet(
                f"with numbers of size {size:g} it raises {type(error).__name__}: {error}"
            )
        if hint:
            return not_yet(f"with numbers of size {size:g} {hint}")
    return right("one scale a tensor: the largest number lands on 448, and none is beyond it")


def _fp8_hint(x: torch.Tensor, data: torch.Tensor, scale: float) -> str:
    largest = data.abs().max().item()
    if not torch.isfinite(data).all() or not math.isfinite(scale):
        return "something is not finite"
    if (data * scale - x).norm() < 0.05 * x.norm():
        return "" if largest == 448 else f"the largest becomes {largest:g}; e4m3 goes up to 448"
    if scale and (data / scale - x).norm() < 0.05 * x.norm():
        return "the scale is the wrong way round: data · scale has to give x back"
    if largest == 448:
        return "some is cut off at 448: bring the largest |x| (it may be negative) to 448 first"
    if largest < 1:
        return "nearly all of it is rounded away: scale it up first"
    return "data · scale does not give x back"


def stays_in_fp32(answer: object) -> Verdict:
    """Exercise D: {"matrix product": "bf16", …}, the type in which each operator may compute."""
    if is_blank(answer):
        return blank()
    if not isinstance(answer, Mapping):
        return not_yet("a dict is wanted: operator -> 'bf16' or 'fp32'")
    for operator, (wanted, hint) in OPERATORS.items():
        given = _short_name(answer.get(operator, ""))
        if given not in ("bf16", "fp32"):
            return not_yet(f"{operator!r} needs 'bf16' or 'fp32'")
        if given != wanted:
            return not_yet(f"{operator!r}: {hint}")
    return right("long sums and small differences stay wide; autocast has the same list")


def _short_name(given: object) -> str:
    """'bf16' for 'bfloat16' and torch.bfloat16, 'fp32' likewise; else what was given."""
    name = str(given).strip().casefold().removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}.get(name, name)


def narrow_all_reduce(answer: object, ranks: Ranks) -> Verdict:
    """Exercise E: the sum over ranks, only bf16 on the wire, rounded twice whatever n is."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted; `def narrow_all_reduce(tensor): ...`")
    try:
        results = ranks.run(_reduce_and_watch, answer, deadline_s=DEADLINE_S)
    except (RankError, TypeError) as error:
        return not_yet(str(error))
    twice = FORMATS["bf16"].rounding_error * math.sqrt(1 + 1 / ranks.world_size)
    for rank, (off, sent, dtype) in enumerate(results):
        if off is None:
            return blank("The function returns nothing yet.")
        if not off < 0.5:
            return not_yet(f"rank {rank} does not get the sum of all ranks' tensors")
        if not sent:
            return not_yet("right, but nothing went over torch.distributed?")
        if set(sent) != {"bfloat16"}:
            return not_yet(f"{', '.join(sorted(sent))} travels; only bfloat16 may")
        if off > 1.15 * twice:
            return not_yet(
                f"only bf16 travels, but the error is {off:.2g}; with two roundings a number it "
                f"would be {twice:.2g}: the sum itself has to be made in fp32"
            )
        if sent["bfloat16"] >= LARGEST_TRAFFIC * NUMBERS:
            return not_yet(
                "narrow and right, but whole tensors go from every rank to every rank: no byte is "
                "saved. Let each rank add up one piece of the sum"
            )
        if dtype != "float32":
            return not_yet(f"right, but the sum comes back as {dtype}; return it in fp32")
    return right("half the bytes, and an error that no longer grows with the ranks")


def _reduce_and_watch(answer: Callable[..., Any]) -> tuple[float | None, dict[str, int], str]:
    """Relative error of the answer's sum on this rank, numbers sent by type, the sum's type."""
    rank, n = dist.get_rank(), dist.get_world_size()
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    terms = [_term(one) for one in range(n)]
    with _types_sent() as sent:
        given = answer(terms[rank].float().to(device))
    if given is None or given is ...:
        return None, {}, ""
    exact = torch.stack(terms).sum(0)
    if not isinstance(given, torch.Tensor) or given.shape != exact.shape:
        return math.inf, sent, ""
    off = ((given.cpu().double() - exact).norm() / exact.norm()).item()
    return off, sent, str(given.dtype).removeprefix("torch.")


def _term(rank: int) -> torch.Tensor:
    """One rank's gradient: the same signal with noise of its own. (numbers,), fp64."""
    noise = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(rank))
    signal = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(999))
    return (signal + 0.1 * noise).double()


@contextmanager
def _types_sent() -> Iterator[dict[str, int]]:
    """Inside: how many numbers of each type are handed to torch.distributed, in and out."""
    sent: dict[str, int] = {}

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                for tensor in _tensors(args):
                    name = str(tensor.dtype).removeprefix("torch.")
                    sent[name] = sent.get(name, 0) + tensor.numel()
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        yield sent


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
