"""The checks of notebook 02: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from labsupport.checks import interconnects as check
from labsupport.plan.communication import fit_latency_bandwidth, point_to_point

ONE_WAY = {"nvlink4": 450, "pcie4-x16": 31.5, "infiniband-ndr": 50, "ethernet-10": 1.25}
SENT_GB = 24.5


def seconds(factor: float = 1.0) -> dict[str, float]:
    return {key: factor * SENT_GB / one_way for key, one_way in ONE_WAY.items()}


def test_sync_times() -> None:
    assert check.sync_times(dict.fromkeys(ONE_WAY, ...)).status == "blank"
    assert check.sync_times(...).status == "blank"
    assert check.sync_times(seconds()).is_right
    assert "both directions" in check.sync_times(seconds(0.5)).hint
    assert "receives uses the other" in check.sync_times(seconds(0.5)).hint
    assert "more than S" in check.sync_times(seconds(4 / 7)).hint
    assert "bf16" in check.sync_times(seconds(2)).hint
    assert "bits" in check.sync_times(seconds(8)).hint
    assert "'ethernet-10' is missing" in check.sync_times({"nvlink4": 1, "pcie4-x16": 1,
                                                            "infiniband-ndr": 1}).hint  # fmt: skip
    assert not check.sync_times(7).is_right
    assert "pcie4-x16" in check.sync_times(seconds() | {"pcie4-x16": "slow"}).hint


SHARES = [0.8167, 0.6, 0.88, 0.4762]


def test_shares() -> None:
    assert check.shares([..., ..., ..., ...]).status == "blank"
    assert check.shares(SHARES).is_right
    assert not check.shares(0.8).is_right
    assert not check.shares(SHARES[:3]).is_right


@pytest.mark.parametrize(
    ("place", "wrong", "hint"),
    [
        (0, 0.408, "both directions"),
        (0, 0.467, "algorithm bandwidth"),
        (0, 81.67, "a fraction"),
        (1, 0.3, "both directions"),
        (2, 0.11, "bits or bytes"),
        (2, 0.44, "one way already"),
        (3, 0.952, "all-reduce's factor"),
    ],
)
def test_shares_tell_a_mistake(place: int, wrong: float, hint: str) -> None:
    given = list(SHARES)
    given[place] = wrong
    told = check.shares(given).hint
    assert told.startswith(f"reading {place + 1}: ")
    assert hint in told


def stub(*arguments: float) -> None: ...


def test_merging() -> None:
    assert check.merging(stub).status == "blank"
    assert check.merging(lambda m, s, k, a, c: (m - 1) * k * a - 2 * m * s / c).is_right
    assert "ZeroDivisionError" in check.merging(lambda m, s, k, a, c: 1 / 0).hint
    assert not check.merging(7).is_right
    assert not check.merging(lambda m, s, k, a, c: 7).is_right


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda m, s, k, a, c: m * k * a - 2 * m * s / c, "still a message"),
        (lambda m, s, k, a, c: (m - 1) * a - 2 * m * s / c, "all its steps"),
        (lambda m, s, k, a, c: (m - 1) * k * a - m * s / c, "and out again"),
        (lambda m, s, k, a, c: (m - 1) * k * a, "copies cost something"),
        (lambda m, s, k, a, c: 2 * m * s / c - (m - 1) * k * a, "the sign"),
    ],
)
def test_merging_tells_a_mistake(formula: Callable[..., float], hint: str) -> None:
    assert hint in check.merging(formula).hint


def test_degraded_hop() -> None:
    times = check.hop_times()
    fits = {
        hop: fit_latency_bandwidth(rows, collective=point_to_point, world_size=2)
        for hop, rows in times.items()
    }
    slowest = min(fits, key=lambda hop: fits[hop].bandwidth_bytes_per_s)
    latest = max(fits, key=lambda hop: fits[hop].latency_s)
    assert slowest != latest
    assert check.hop_times() == times  # the same for everybody
    assert check.degraded_hop(..., ...).status == "blank"
    assert check.degraded_hop(slowest, fits[slowest].bandwidth_bytes_per_s / 1e9).is_right
    assert "answers late" in check.degraded_hop(latest, 48).hint
    assert "large messages" in check.degraded_hop(0, 48).hint
    assert "bits or bytes" in check.degraded_hop(slowest, 8 * 12.1).hint


def cards(gpus: int, inside: float, card: float) -> float:
    return inside / (2 * (gpus - 1) / gpus) / card


def test_cards_needed() -> None:
    assert check.cards_needed(stub).status == "blank"
    assert check.cards_needed(lambda k, i, c: math.ceil(cards(k, i, c))).is_right
    assert "TypeError" in check.cards_needed(lambda k, i, c: k + "").hint
    assert not check.cards_needed(lambda k, i, c: k).is_right
    assert not check.cards_needed(6).is_right


@pytest.mark.parametrize(
    ("formula", "hint"),
    [
        (lambda k, i, c: math.floor(cards(k, i, c)), "round up"),
        (lambda k, i, c: cards(k, i, c), "whole number"),
        (lambda k, i, c: math.ceil(2 * cards(k, i, c)), "two laps"),
        (lambda k, i, c: math.ceil(i / c), "2(k - 1)/k S"),
        (lambda k, i, c: math.ceil(k * i / c), "share the work"),
    ],
)
def test_cards_needed_tells_a_mistake(formula: Callable[..., float], hint: str) -> None:
    assert hint in check.cards_needed(formula).hint
