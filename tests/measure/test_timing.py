from __future__ import annotations

import itertools
import time

import pytest

from labsupport.measure.timing import Timing, time_call


def test_median_quartiles_and_spread_by_hand() -> None:
    timing = Timing(times_s=(0.4, 0.1, 0.2, 0.3, 9.0), warmup=0)
    assert timing.median_s == 0.3
    assert timing.quartiles_s == pytest.approx((0.2, 0.4))
    assert timing.relative_spread == pytest.approx(0.2 / 0.3)
    assert str(timing) == "300 ms median of 5 (200 to 400 for the middle half)"


def test_one_repeat_has_no_spread() -> None:
    assert Timing(times_s=(2.0,), warmup=0).relative_spread == 0


def test_warm_up_is_not_counted_and_before_is_outside_the_clock() -> None:
    durations = itertools.chain([0.2], itertools.repeat(0.005))
    timing = time_call(
        lambda: time.sleep(next(durations)),
        warmup=1,
        repeats=3,
        before=lambda: time.sleep(0.05),
    )
    assert len(timing.times_s) == 3
    assert max(timing.times_s) < 0.05


def test_the_clock_waits_for_the_device() -> None:
    timing = time_call(lambda: None, repeats=2, synchronize=lambda: time.sleep(0.01))
    assert timing.median_s >= 0.01


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"repeats": 0}])
def test_bad_counts_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="2 and 10 work"):
        time_call(lambda: None, **wrong)
    with pytest.raises(ValueError, match=r"times_s=\(0.1,\) works"):
        Timing(times_s=(), warmup=0)
