"""The noise scale: worked by hand, and recovered from gradients whose noise is known."""

from __future__ import annotations

import math
import random

import pytest

from labsupport.plan.batch import NoiseScale, noise_scale


def test_by_hand() -> None:
    # |G|² = 2, noise = 24: |g_4|² = 2 + 24/4 = 8, |g_12|² = 2 + 24/12 = 4
    scale = noise_scale([7.0, 9.0], [5.0, 3.0], small_batch=4, large_batch=12)
    assert (scale.signal, scale.noise, scale.batch) == pytest.approx((2, 24, 12))


def test_gradients_with_known_noise() -> None:
    draw = random.Random(0)
    true, spread = [0.5, -0.2, 0.1], 2.0  # per sample and coordinate
    small, large = [], []
    for _ in range(4000):
        ranks = [[t + draw.gauss(0, spread / math.sqrt(4)) for t in true] for _ in range(2)]
        mean = [sum(pair) / 2 for pair in zip(*ranks, strict=True)]
        small.append(sum(x * x for rank in ranks for x in rank) / 2)
        large.append(sum(x * x for x in mean))
    scale = noise_scale(small, large, small_batch=4, large_batch=8)
    assert scale.noise == pytest.approx(3 * spread**2, rel=0.05)
    assert scale.signal == pytest.approx(0.3, rel=0.15)


def test_the_scale_is_where_both_prices_are_twice_the_least() -> None:
    scale = NoiseScale(signal=2.0, noise=24.0)
    assert scale.steps_factor(12) == scale.samples_factor(12) == 2
    assert (scale.steps_factor(24), scale.samples_factor(24)) == (1.5, 3)
    assert scale.learning_rate_factor(small=0.001, large=0.004) == pytest.approx(4, rel=1e-3)
    assert scale.learning_rate_factor(small=1e5, large=4e5) == pytest.approx(1, rel=1e-3)


def test_no_signal_means_no_bound() -> None:
    assert noise_scale([1.0], [0.4], small_batch=1, large_batch=2).batch == math.inf


@pytest.mark.parametrize(
    ("small", "large", "batches", "message"),
    [
        ([], [], (4, 8), "at least one"),
        ([1.0], [1.0, 2.0], (4, 8), "must be as many"),
        ([1.0], [1.0], (8, 8), "for example 4 and 8"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    small: list[float], large: list[float], batches: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        noise_scale(small, large, small_batch=batches[0], large_batch=batches[1])


def test_an_estimate_without_noise_is_no_error() -> None:
    quiet = noise_scale([4.0, 4.0], [4.1, 4.1], small_batch=4, large_batch=8)
    assert quiet.noise < 0
    assert quiet.batch == 0
    assert quiet.steps_factor(8) == 1
    assert quiet.samples_factor(8) == math.inf
