"""When was a GPU busy, and with what? Its own record, read through torch's profiler.

    kernels named nccl…  -> communication          all others -> compute

    with record_kernels(rank=0) as spans:
        train_step(…)
    spans                       # filled when the block is left

Thousands of kernels follow one another closely; those less than 20 µs apart become one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from labsupport.measure.trace.spans import COMMUNICATION, COMPUTE, Span

JOIN_WITHIN_S = 20e-6


class Kernel(NamedTuple):
    """One entry of the GPU's record, in nanoseconds of the system's clock."""

    name: str
    start_ns: int
    end_ns: int


@contextmanager
def record_kernels(*, rank: int) -> Iterator[list[Span]]:
    """A list that holds the spans of this process's GPU once the block is left."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    spans: list[Span] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        yield spans
        torch.cuda.synchronize()
    events: Any = profiler.profiler
    kernels = [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events.kineto_results.events()
        if event.device_type().name == "CUDA"
        and event.duration_ns() > 0
        and not event.is_user_annotation()  # a name for several kernels, which are there as well
    ]
    spans += spans_of_kernels(kernels, rank=rank)


def spans_of_kernels(kernels: Iterable[Kernel], *, rank: int) -> list[Span]:
    """Kernels of one kind that follow each other closely, as one span each."""
    spans: list[Span] = []
    for stream in (COMPUTE, COMMUNICATION):
        chosen = [k for k in kernels if _is_nccl(k) == (stream == COMMUNICATION)]
        for kernel in sorted(chosen, key=lambda kernel: kernel.start_ns):
            start_s, end_s = kernel.start_ns / 1e9, kernel.end_ns / 1e9
            name = kernel.name if stream == COMMUNICATION else "kernels"
            last = spans[-1] if spans and spans[-1].stream == stream else None
            if last is not None and stream == COMPUTE and start_s - last.end_s < JOIN_WITHIN_S:
                start_s, end_s = last.start_s, max(last.end_s, end_s)
                spans.pop()
            spans.append(Span(rank=rank, stream=stream, name=name, start_s=start_s, end_s=end_s))
    return spans


def _is_nccl(kernel: Kernel) -> bool:
    return kernel.name.lower().startswith("nccl")
