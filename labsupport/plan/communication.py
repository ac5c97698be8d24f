"""How long does a collective take on a given link, and which of the link's two numbers decides?

    time = steps x latency + link_bytes / bandwidth                  (the alpha-beta model)

`steps` is how many messages follow one another, `link_bytes` how many bytes pass, one after the
other, through one direction of the busiest rank's link. A ring all-reduce of S bytes over n ranks
takes 2(n - 1) steps and 2(n - 1)/n S bytes (Patarasuk and Yuan, 2009; also nccl-tests' factor).

    cost = ring_all_reduce(size_bytes=64e6, world_size=8)
    predict(cost, latency_s=3e-6, bandwidth_bytes_per_s=450e9).total_s        # 0.00029
    fit_latency_bandwidth(rows, collective=ring_all_reduce, world_size=2)     # from measurements
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """What one collective asks of a link, whatever the link: messages in a row and bytes."""

    steps: int
    link_bytes: float


@dataclass(frozen=True, kw_only=True)
class PredictedTime:
    """The two terms of the model. Label: predicted, by alpha-beta."""

    latency_s: float
    """steps x latency: paid whatever the size."""
    transfer_s: float
    """link_bytes / bandwidth: grows with the size."""

    @property
    def total_s(self) -> float:
        """The prediction."""
        return self.latency_s + self.transfer_s

    @property
    def dominant(self) -> Literal["latency", "bandwidth"]:
        """The term that a faster link would have to improve first."""
        return "latency" if self.latency_s > self.transfer_s else "bandwidth"


class Collective(Protocol):
    """A function below: bytes and ranks in, cost out. Sizes follow nccl-tests (see each)."""

    def __call__(self, *, size_bytes: float, world_size: int) -> CollectiveCost: ...


def point_to_point(*, size_bytes: float, world_size: int = 2) -> CollectiveCost:
    """One message of S bytes."""
    _check(size_bytes, world_size)
    return CollectiveCost(steps=1, link_bytes=size_bytes)


def ring_all_reduce(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """S bytes on every rank, summed everywhere: a reduce-scatter, then an all-gather."""
    _check(size_bytes, world_size)
    return CollectiveCost(
        steps=2 * (world_size - 1), link_bytes=2 * (world_size - 1) / world_size * size_bytes
    )


def naive_all_reduce(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """Every rank sends all S bytes to rank 0, one after the other; rank 0 sends all sums back."""
    _check(size_bytes, world_size)
    messages = 2 * (world_size - 1)
    return CollectiveCost(steps=messages, link_bytes=messages * size_bytes)


def tree_all_reduce(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """Up a binomial tree and down again, whole buffers: few steps, many bytes. For small S."""
    levels = tree_broadcast(size_bytes=size_bytes, world_size=world_size).steps
    return CollectiveCost(steps=2 * levels, link_bytes=2 * levels * size_bytes)


def reduce_scatter(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """Ring; S is the whole buffer that each rank puts in, of which it keeps S/n summed."""
    _check(size_bytes, world_size)
    return CollectiveCost(
        steps=world_size - 1, link_bytes=(world_size - 1) / world_size * size_bytes
    )


def all_gather(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """Ring; S is the gathered whole, to which each rank gives S/n."""
    return reduce_scatter(size_bytes=size_bytes, world_size=world_size)


def all_to_all(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """Pairwise; S is what one rank puts in, S/n of it for every rank, one of them itself."""
    return reduce_scatter(size_bytes=size_bytes, world_size=world_size)


def ring_broadcast(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """S bytes from rank 0, handed on in small pieces: n - 1 hops to fill the pipe, S bytes."""
    _check(size_bytes, world_size)
    return CollectiveCost(steps=world_size - 1, link_bytes=size_bytes if world_size > 1 else 0.0)


def tree_broadcast(*, size_bytes: float, world_size: int) -> CollectiveCost:
    """S bytes from rank 0; at each of ceil(log2 n) steps twice as many ranks have them."""
    _check(size_bytes, world_size)
    levels = (world_size - 1).bit_length()
    return CollectiveCost(steps=levels, link_bytes=levels * size_bytes)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": ring_all_reduce,
    "all_reduce (tree)": tree_all_reduce,
    "all_reduce (naive)": naive_all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": ring_broadcast,
    "send / recv": point_to_point,
}
"""Names for menus; code passes the functions."""


def predict(
    cost: CollectiveCost, *, latency_s: float, bandwidth_bytes_per_s: float
) -> PredictedTime:
    """Alpha-beta time of `cost` on a link with a latency and a bandwidth in one direction."""
    if not (latency_s >= 0 and bandwidth_bytes_per_s > 0):
        raise ValueError(
            f"{latency_s=} must be at least 0 and {bandwidth_bytes_per_s=} above 0; "
            "latency_s=5e-6 and bandwidth_bytes_per_s=25e9 work"
        )
    return PredictedTime(
        latency_s=cost.steps * latency_s, transfer_s=cost.link_bytes / bandwidth_bytes_per_s
    )


@dataclass(frozen=True, kw_only=True)
class TimedSize:
    """One measured point; the rows of `measure.collectives` fit in its place."""

    size_bytes: float
    time_s: float


class _Timed(Protocol):
    @property
    def size_bytes(self) -> float: ...
    @property
    def time_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """Latency and bandwidth that explain measured times best, and how badly they miss."""

    collective: Collective = field(repr=False)
    world_size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    """What one direction of the link carries: for an all-reduce, the bus bandwidth it tends to."""
    median_relative_error: float
    """Median of |predicted - measured| / measured over the points of the fit."""
    worst_relative_error: float
    num_points: int

    def __str__(self) -> str:
        return (
            f"latency {self.latency_s * 1e6:.3g} us, bandwidth "
            f"{self.bandwidth_bytes_per_s / 1e9:.3g} GB/s, typical error "
            f"{self.median_relative_error:.0%} over {self.num_points} points"
        )

    def predict(self, *, size_bytes: float) -> PredictedTime:
        """Time of the fitted collective at one size, which need not have been measured."""
        cost = self.collective(size_bytes=size_bytes, world_size=self.world_size)
        return predict(
            cost,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )

    @property
    def crossover_bytes(self) -> float:
        """The size at which latency and bandwidth cost the same; half the bandwidth is reached."""
        return crossover_bytes(
            self.collective,
            world_size=self.world_size,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )


def crossover_bytes(
    collective: Collective, *, world_size: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """S at which steps x latency = link_bytes / bandwidth (link_bytes is proportional to S)."""
    if world_size < 2:
        raise ValueError(f"{world_size=} sends nothing; a crossover needs at least 2 ranks")
    cost = collective(size_bytes=1.0, world_size=world_size)
    return cost.steps * latency_s * bandwidth_bytes_per_s / cost.link_bytes


def fit_latency_bandwidth(
    points: Iterable[_Timed], *, collective: Collective = ring_all_reduce, world_size: int
) -> LinkFit:
    """The latency and bandwidth with the least sum of squared *relative* errors.

    Each point counts by its relative error, so that a 1 KiB message weighs as much as 64 MiB;
    unweighted, the largest sizes would drown the latency. Neither number can come out negative.
    Raises ValueError for fewer than two sizes, a time of zero, or times that do not grow.
    """
    rows = [(float(point.size_bytes), float(point.time_s)) for point in points]
    if len({size for size, _ in rows}) < 2:
        raise ValueError(f"{len(rows)} point(s) of too few sizes; two numbers need two sizes")
    if any(time_s <= 0 for _, time_s in rows):
        raise ValueError(
            "a time of 0 s or less cannot be fitted; repeat the message until it shows"
        )
    if world_size < 2:
        raise ValueError(f"{world_size=} sends nothing; a fit needs at least 2 ranks")
    costs = [collective(size_bytes=size, world_size=world_size) for size, _ in rows]
    steps = [cost.steps / time_s for cost, (_, time_s) in zip(costs, rows, strict=True)]
    moved = [cost.link_bytes / time_s for cost, (_, time_s) in zip(costs, rows, strict=True)]
    latency_s, s_per_byte = _least_squares(steps, moved)
    errors = [
        abs(latency_s * step + s_per_byte * load - 1)
        for step, load in zip(steps, moved, strict=True)
    ]
    return LinkFit(
        collective=collective,
        world_size=world_size,
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / s_per_byte,
        median_relative_error=median(errors),
        worst_relative_error=max(errors),
        num_points=len(rows),
    )


def _least_squares(first: list[float], second: list[float]) -> tuple[float, float]:
    """(a, b) that minimise the sum of (a x first + b x second - 1)^2, with a >= 0 and b > 0."""
    ff = math.fsum(x * x for x in first)
    fs = math.fsum(x * y for x, y in zip(first, second, strict=True))
    ss = math.fsum(y * y for y in second)
    f, s = math.fsum(first), math.fsum(second)
    determinant = ff * ss - fs * fs
    a, b = (f * ss - s * fs) / determinant, (s * ff - f * fs) / determinant
    if b <= 0:
        raise ValueError("the times do not grow with the size; add larger sizes, 16 MiB or more")
    return (a, b) if a >= 0 else (0.0, s / ss)


def _check(size_bytes: float, world_size: int) -> None:
    if size_bytes < 0 or world_size < 1:
        raise ValueError(
            f"{size_bytes=} must be at least 0 and {world_size=} at least 1; "
            "size_bytes=2**20 and world_size=8 work"
        )
