"""How large may a batch become before more ranks only read more text and learn no more from it?

    |g_b|² = |G|² + noise / b        mean gradient of b samples: the true one, and noise / b on top
    noise scale = noise / |G|²       the batch whose gradient is half signal, half noise

Two batch sizes give two equations for two unknowns. N data-parallel ranks have both for nothing:
each rank's own gradient (b = B / N), and the mean of all (B). "Simple noise scale" of McCandlish et
al. (2018), "An Empirical Model of Large-Batch Training"; its appendix A.1 has the estimator.

    scale = noise_scale([9.0, 8.6], [6.1, 5.8], small_batch=4, large_batch=8)
    scale.batch                            # in the unit of the two batches, here sequences
    scale.samples_factor(64)               # reads this many times the fewest samples possible
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Signal and noise of the gradient, over the steps that were looked at."""

    signal: float
    """|G|²: squared length of the gradient of infinitely many samples."""
    noise: float
    """Trace of the covariance of a single sample's gradient."""

    @property
    def batch(self) -> float:
        """noise / signal, in samples; infinite where no signal was left to see, 0 without noise."""
        return max(0.0, self.noise) / self.signal if self.signal > 0 else math.inf

    def steps_factor(self, batch: float) -> float:
        """Steps to a given loss, in multiples of the fewest that any batch needs: 1 + scale / B."""
        return 1 + self.batch / batch

    def samples_factor(self, batch: float) -> float:
        """Samples to a given loss, in multiples of the fewest of any batch: 1 + B / scale."""
        return 1 + batch / self.batch if self.batch else math.inf

    def learning_rate_factor(self, *, small: float, large: float) -> float:
        """How much higher the best rate of SGD is at the batch `large` than at `small`.

        The best rate is proportional to 1 / (1 + scale / B): linear in B far below the scale,
        constant far above it.
        """
        return self.steps_factor(small) / self.steps_factor(large)


def noise_scale(
    small_squared: Sequence[float],
    large_squared: Sequence[float],
    *,
    small_batch: float,
    large_batch: float,
) -> NoiseScale:
    """Estimate from squared gradient lengths of two batch sizes, one entry a step.

    The two are averaged over the steps before the division: a ratio of noisy numbers would be
    biased. Raises ValueError for unequal or missing steps, and for batches that do not differ.
    """
    if not small_squared or len(small_squared) != len(large_squared):
        raise ValueError(
            f"{len(small_squared)} and {len(large_squared)} squared norms must be as many, at "
            "least one, for example [9.0, 8.6] and [6.1, 5.8]"
        )
    if not 0 < small_batch < large_batch:
        raise ValueError(
            f"{small_batch=} must be above 0 and below {large_batch=}, for example 4 and 8"
        )
    small = math.fsum(small_squared) / len(small_squared)
    large = math.fsum(large_squared) / len(large_squared)
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    return NoiseScale(signal=signal, noise=noise)
