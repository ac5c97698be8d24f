"""Which memory do the arguments and results of an operation stand on?

    for tensor in tensors_in((args, kwargs)):       # plain ones: of a sharded one what is held here
        key_of(tensor)                              # equal where two tensors share their memory

FSDP frees and allocates without an operation, by making memory shorter and longer again:
`watch_resizes` tells. What CUDA's allocator says stands in `read_allocator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from labsupport.measure.memory_timeline import AllocatorReading


@contextmanager
def watch_resizes(tell: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call `tell` with each memory that has just got another length."""
    resize = UntypedStorage.resize_

    def resize_and_tell(storage: UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        tell(storage)
        return result

    UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    """The arguments that are parameters themselves, sharded or not."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from parameters_in(value)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts; of a sharded one what this rank holds."""
    for value in values:
        if isinstance(value, DTensor):
            yield value.to_local()
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def key_of(tensor: Tensor) -> int:
    """Of the memory: tensors that share it are counted once."""
    key: int = tensor.untyped_storage()._cdata
    return key


def read_allocator(step: int, phase: str, device: torch.device) -> AllocatorReading:
    """What the phase that ends now has done; the peak starts again."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    reading = AllocatorReading(
        step=step,
        phase=phase,
        allocated_bytes=torch.cuda.memory_allocated(device),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=reserved_bytes,
        non_torch_bytes=total_bytes - free_bytes - reserved_bytes,
    )
    torch.cuda.reset_peak_memory_stats(device)
    return reading
