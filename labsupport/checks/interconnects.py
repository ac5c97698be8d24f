"""Checks of notebook 02: seconds on four links, shares of a datasheet, merging, a bad hop, cards.

from labsupport.checks import interconnects as check
check.sync_times({"nvlink4": 0.05, ...})
hops = check.hop_times()        # given data for exercise D: hop -> sizes and times
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from labsupport.checks import Verdict, blank, function, is_blank, not_yet, number, right
from labsupport.hardware import link
from labsupport.plan.communication import TimedSize, ring_all_reduce

GIGA = 10**9
GRADIENT_BYTES = 14 * GIGA
"""7e9 parameters of 2 bytes."""
SYNC_RANKS = 8
FOUR_LINKS = ("nvlink4", "pcie4-x16", "infiniband-ndr", "ethernet-10")

DEGRADED_HOP, LATE_HOP = 5, 2
NUM_HOPS = 8
DEGRADED_BYTES_PER_S = 12.1e9
HEALTHY_BYTES_PER_S = 48.5e9


def sync_times(answer: object) -> Verdict:
    """Seconds to all-reduce the gradients of a 7B model over 8 ranks, on each of four links."""
    if is_blank(answer):
        return blank()
    if not isinstance(answer, Mapping):
        return not_yet("a dictionary is wanted: the link's key, and seconds")
    missing = [key for key in FOUR_LINKS if key not in answer]
    if missing:
        return not_yet(f"{missing[0]!r} is missing")
    cost = ring_all_reduce(size_bytes=GRADIENT_BYTES, world_size=SYNC_RANKS)
    for key in FOUR_LINKS:
        one_way = link(key).one_way_bytes_per_s
        expected = cost.link_bytes / one_way
        hints = {
            expected / 2: "you divide by both directions together; a rank sends in one, "
            "and what it receives uses the other",
            GRADIENT_BYTES / one_way: "each rank sends more than S: 2(n - 1)/n of it",
            expected * 2: "2 bytes a parameter: bf16",
            expected * SYNC_RANKS: "bits or bytes? or did you let all ranks share one link?",
        }
        verdict = number(answer[key], expected, rel=0.03, hints=hints)
        if not verdict.is_right:
            return not_yet(f"{key}: {verdict.hint}")
    return right("From 54 ms to 20 s for the same bytes. Notebook 06 hides part of it.")


def shares(answer: object) -> Verdict:
    """Share of the link, one way, in the four readings of exercise B."""
    if is_blank(answer):
        return blank()
    given = list(answer) if isinstance(answer, list | tuple) else []
    if len(given) != len(_READINGS):
        return not_yet(f"a list of {len(_READINGS)} shares is wanted, such as [0.9, ...]")
    for name, (value, (expected, hints)) in zip(
        "1234", zip(given, _READINGS, strict=True), strict=True
    ):
        percent = {100 * expected: "a fraction is wanted: 0.8 for 80%"}
        verdict = number(value, expected, rel=0.02, hints={**hints, **percent})
        if not verdict.is_right:
            return not_yet(f"reading {name}: {verdict.hint}")
    return right("Only 2 and 4 deserve a closer look; 44 of 400 looked worse than either.")


_BOTH_WAYS = "the sheet counts both directions together"
_ALGORITHM = "that is algorithm bandwidth; what does the link carry?"
_READINGS: tuple[tuple[float, Mapping[float, str]], ...] = (
    (
        210 * 2 * 7 / 8 / 450,
        {210 * 2 * 7 / 8 / 900: _BOTH_WAYS, 210 / 450: _ALGORITHM, 210 / 900: _ALGORITHM},
    ),
    (180 / 300, {180 / 600: _BOTH_WAYS, 180 * 2 * 7 / 8 / 300: "it is bus bandwidth already"}),
    (44 / 50, {44 / 400: "bits or bytes?", 44 / 100: "a network port's figure is one way already"}),
    (
        20 * 3 / 4 / 31.5,
        {
            20 / 31.5: _ALGORITHM,
            20 / 63: _ALGORITHM,
            20 * 3 / 4 / 63: _BOTH_WAYS,
            20 * 2 * 3 / 4 / 31.5: "2(n - 1)/n is all-reduce's factor; this is an all-gather",
        },
    ),
)


def merging(answer: Any) -> Verdict:
    """`saved_s(num_messages, size_bytes, steps, latency_s, copy_bytes_per_s)` by merging."""
    wrong: tuple[tuple[Callable[..., float], str], ...] = (
        (lambda m, s, k, a, c: m * k * a - 2 * m * s / c, "one merged message is still a message"),
        (lambda m, s, k, a, c: (m - 1) * a - 2 * m * s / c, "each message pays for all its steps"),
        (
            lambda m, s, k, a, c: (m - 1) * k * a - m * s / c,
            "copied into the bucket, and out again",
        ),
        (lambda m, s, k, a, c: (m - 1) * k * a, "the copies cost something too"),
        (
            lambda m, s, k, a, c: 2 * m * s / c - (m - 1) * k * a,
            "look at the sign: saved, not lost",
        ),
    )
    verdict = function(
        answer, [(case, _saved_s(*case)) for case in _MERGING], rel=1e-6, why=_MERGING_WHY
    )
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    for formula, hint in wrong:
        if _agrees(answer, formula):
            return not_yet(hint)
    return verdict


_MERGING = ((100, 65_536, 14, 10e-6, 100e9), (2, 2**26, 2, 5e-6, 200e9), (1, 4096, 2, 1e-6, 1e11))
_MERGING_WHY = (
    "Positive for small messages, negative for large ones, which gain nothing: hence buckets "
    "of some MiB, not one for all."
)


def _saved_s(m: int, size_bytes: float, steps: int, latency_s: float, copy: float) -> float:
    return (m - 1) * steps * latency_s - 2 * m * size_bytes / copy


def _agrees(answer: Callable[..., Any], formula: Callable[..., float]) -> bool:
    try:
        return all(
            math.isclose(answer(*case), formula(*case), rel_tol=1e-6, abs_tol=1e-15)
            for case in _MERGING
        )
    except Exception:  # whatever it raises, `function` has told it
        return False


def hop_times() -> dict[int, list[TimedSize]]:
    """Made-up times of messages on the eight hops of a ring: hop r is from rank r to the next.

    One hop has lost three quarters of its bandwidth, another answers late. A fixed wobble of up to
    3% stands for noise.
    """
    found = {}
    for hop in range(NUM_HOPS):
        latency_s = 95e-6 if hop == LATE_HOP else 12e-6
        rate = DEGRADED_BYTES_PER_S if hop == DEGRADED_HOP else HEALTHY_BYTES_PER_S
        found[hop] = [
            TimedSize(
                size_bytes=2**power,
                time_s=(latency_s + 2**power / rate) * (1 + 0.03 * math.sin(5 * hop + 2 * power)),
            )
            for power in (12, 16, 20, 24, 28)
        ]
    return found


def degraded_hop(hop: object, bandwidth_gb_per_s: object) -> Verdict:
    """Which hop of `hop_times` is degraded, and what it carries."""
    if is_blank([hop, bandwidth_gb_per_s]):
        return blank()
    which = number(
        hop,
        DEGRADED_HOP,
        rel=1e-9,
        hints={LATE_HOP: "that one answers late, but carries large messages as well as the others"},
    )
    if not which.is_right:
        known = which.hint if "late" in which.hint else "not this hop: compare the large messages"
        return not_yet(known)
    return number(
        bandwidth_gb_per_s,
        DEGRADED_BYTES_PER_S / GIGA,
        rel=0.06,
        why="A quarter of the others: a ring passes every hop, so all of it runs at this speed.",
    )


def cards_needed(answer: Any) -> Verdict:
    """`cards_needed(gpus, inside_gb_per_s, card_gb_per_s)`: as fast across as inside."""
    wrong: tuple[tuple[Callable[[int, float, float], float], str], ...] = (
        (
            lambda k, i, c: math.floor(_cards(k, i, c)),
            "a part of a card cannot be bought: round up",
        ),
        (lambda k, i, c: math.ceil(2 * _cards(k, i, c)), "two laps inside, not one"),
        (
            lambda k, i, c: math.ceil(i / c),
            "inside a GPU moves 2(k - 1)/k S, across the node moves S",
        ),
        (
            lambda k, i, c: math.ceil(k * i / c),
            "the GPUs of a node share the work: S in all across",
        ),
        (lambda k, i, c: _cards(k, i, c), "a whole number of cards is wanted"),
    )
    cases = [(case, math.ceil(_cards(*case))) for case in _NODES]
    verdict = function(answer, cases, rel=1e-9, why=_CARDS_WHY)
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    for formula, hint in wrong:
        if _gives(answer, formula):
            return not_yet(hint)
    return verdict


_NODES = ((8, 450.0, 50.0), (8, 300.0, 25.0), (4, 300.0, 25.0), (8, 63.0, 50.0))
_CARDS_WHY = (
    "Six for eight H100s with 400 Gb/s cards; makers fit eight, one a GPU, which also spares "
    "the data a detour inside."
)


def _cards(gpus: int, inside_gb_per_s: float, card_gb_per_s: float) -> float:
    """S / (cards x card) = 2(k - 1)/k S / inside, solved for the cards."""
    return inside_gb_per_s / (2 * (gpus - 1) / gpus * card_gb_per_s)


def _gives(answer: Callable[..., Any], formula: Callable[[int, float, float], float]) -> bool:
    try:
        return all(math.isclose(answer(*case), formula(*case), rel_tol=1e-9) for case in _NODES)
    except Exception:  # whatever it raises, `function` has told it
        return False
