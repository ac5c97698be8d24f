"""What all ranks of a pool have in common, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from labsupport import devices

MEMORY_PER_RANK_BYTES = 100 * 2**20
MOST_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class Settings:
    """What all ranks of a pool have in common."""

    world_size: int
    backend: str
    device: str
    threads: int
    collective_timeout_s: float
    env: Mapping[str, str]


def make_settings(
    world_size: int,
    *,
    device: str,
    collective_timeout_s: float,
    threads_per_rank: int | None,
    env: Mapping[str, str],
) -> Settings:
    """Fill in what is left to choose. Raises ValueError for what cannot work."""
    place = devices.choose_device(world_size, device)
    _check(world_size, collective_timeout_s, env)
    threads = devices.threads_per_rank(world_size, threads_per_rank, env={**os.environ, **env})
    return Settings(
        world_size=world_size,
        backend=place.backend,
        device=place.device,
        threads=threads,
        collective_timeout_s=float(collective_timeout_s),
        env=_environment(threads, env),
    )


def _check(world_size: int, collective_timeout_s: float, env: Mapping[str, str]) -> None:
    most = max(1, psutil.virtual_memory().available // MEMORY_PER_RANK_BYTES)
    if world_size > most:
        raise ValueError(
            f"{world_size=} does not fit: a rank takes about "
            f"{MEMORY_PER_RANK_BYTES // 2**20} MiB of the memory left; at most {most} fit"
        )
    is_number = isinstance(collective_timeout_s, int | float)
    if not is_number or not 0 < collective_timeout_s < MOST_TIMEOUT_S:
        raise ValueError(
            f"{collective_timeout_s=} must be a number of seconds above 0 and below "
            f"{MOST_TIMEOUT_S:g}; 30 works"
        )
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env[{name!r}]={value!r} must be text; {str(value)!r} works")


def _environment(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """The ranks' whole environment. The pool is local, so gloo is bound to the loopback device."""
    local = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": devices.loopback_interface()}
    return {**os.environ, **local, **env}
