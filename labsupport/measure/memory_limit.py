"""What happens when memory runs out? Set a limit that really stops the program.

    allocation 1 … n fits  →  allocation n + 1 does not  →  RuntimeError with its size, and where

    with limit_memory(64 * 2**20, device=device):     # 64 MiB more than are in use now
        train_step(...)                               # RuntimeError: … tried to allocate …

On a CPU under Linux it is the operating system's limit on this process's addresses (RLIMIT_AS); on
a GPU the allocator's share of the device. Other systems do not enforce one. Set it on a rank, not
in the notebook: a limit stops whatever asks next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limit_memory(extra_bytes: int, *, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside the block this process may take `extra_bytes` more than it has now.

    Raises ValueError for less than 1 MiB, RuntimeError on a system that enforces no limit.
    """
    if extra_bytes < 2**20:
        raise ValueError(f"{extra_bytes=} must be at least 1 MiB (2**20), for example {2**26}")
    limit = _limit_gpu if torch.device(device).type == "cuda" else _limit_addresses
    with limit(extra_bytes, torch.device(device)):
        yield


@contextmanager
def _limit_addresses(extra_bytes: int, _: torch.device) -> Iterator[None]:
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"{sys.platform} does not limit a process's memory; Linux or a GPU does")
    import resource

    with open("/proc/self/statm") as file:  # counts pages: addresses, resident, …
        in_use_bytes = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + extra_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _limit_gpu(extra_bytes: int, device: torch.device) -> Iterator[None]:
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info(device)
    share = (torch.cuda.memory_reserved(device) + extra_bytes) / total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
