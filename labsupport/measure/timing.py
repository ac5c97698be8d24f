"""How long does a call take, and can I trust the number?

    warm up  ->  synchronise, start, call, synchronise, stop (repeat)  ->  median and spread

The first calls pay for things that later calls do not (allocation, connections, caches), so they
are not counted. A GPU call returns before its work is done, so the clock waits for the device.
The median ignores the one call that the operating system interrupted; the spread shows it.

    timing = time_call(lambda: x @ x, synchronize=lambda: devices.synchronize(x.device))
    print(timing)                       # 1.21 ms median of 10 (1.18 to 1.31 for the middle half)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles


def nothing() -> None:
    """Stands where there is nothing to wait for: a CPU has finished when it returns."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Every repeat of one measurement, in the order they ran. Label: measured."""

    times_s: tuple[float, ...]
    warmup: int

    def __post_init__(self) -> None:
        if not self.times_s:
            raise ValueError("a Timing needs at least one time; times_s=(0.1,) works")

    @property
    def median_s(self) -> float:
        """The middle time."""
        return median(self.times_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """A quarter of the times lie below the first number, a quarter above the second."""
        if len(self.times_s) == 1:
            return self.times_s[0], self.times_s[0]
        low, _, high = quantiles(self.times_s, n=4, method="inclusive")
        return low, high

    @property
    def relative_spread(self) -> float:
        """Width of the middle half over the median: 0.05 is steady, 0.5 is a busy machine."""
        low, high = self.quartiles_s
        return (high - low) / self.median_s if self.median_s else 0.0

    def __str__(self) -> str:
        low, high = self.quartiles_s
        unit, factor = next(
            ((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if self.median_s * f >= 1), ("us", 1e6)
        )
        return (
            f"{self.median_s * factor:.3g} {unit} median of {len(self.times_s)} "
            f"({low * factor:.3g} to {high * factor:.3g} for the middle half)"
        )


def time_call(
    call: Callable[[], object],
    *,
    warmup: int = 2,
    repeats: int = 10,
    synchronize: Callable[[], object] = nothing,
    before: Callable[[], object] = nothing,
) -> Timing:
    """Time `call` `repeats` times after `warmup` uncounted calls.

    `before` runs ahead of each call, outside the clock (reset a buffer, meet at a barrier).
    Raises ValueError for a negative warm-up or no repeats.
    """
    if warmup < 0 or repeats < 1:
        raise ValueError(f"{warmup=} must be at least 0 and {repeats=} at least 1; 2 and 10 work")
    times_s = []
    for _ in range(warmup + repeats):
        before()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times_s.append(time.perf_counter() - start)
    return Timing(times_s=tuple(times_s[warmup:]), warmup=warmup)
