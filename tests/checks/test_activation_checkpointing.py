"""The checks of notebook 05: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import pytest

from labsupport.checks import activation_checkpointing as check
from labsupport.checks.activation_checkpointing import Operator
from labsupport.plan.recompute import best_segment, segmented_peak_bytes

SHAPE = {"num_layers": 96, "input_bytes": 64 * 2**20, "layer_bytes": 34 * 64 * 2**20}


def test_best_segment() -> None:
    best = best_segment(**SHAPE)
    peak_gib = segmented_peak_bytes(segment=best, **SHAPE) / 2**30
    assert check.best_segment(..., ...).status == "blank"
    assert check.best_segment(best, peak_gib).is_right
    assert "√96" in check.best_segment(10, peak_gib).hint
    assert "1, 2 and 3" in check.best_segment(1, peak_gib).hint
    assert "inputs of the segments" in check.best_segment(best, 4.25).hint
    assert "computed again" in check.best_segment(best, 3).hint
    assert "one input a segment" in check.best_segment(best, 10.25).hint
    assert "an input takes 64 MiB" in check.best_segment(best, 116).hint
    assert check.best_segment(None, None).status == "blank"


def test_flash_attention() -> None:
    assert check.flash_attention(..., ..., ...).status == "blank"
    assert check.flash_attention(4, 1, 0.25).is_right
    assert "of one head" in check.flash_attention(0.125, 1, 0.25).hint
    assert "2 bytes" in check.flash_attention(8, 1, 0.25).hint
    assert "fp32" in check.flash_attention(4, 0.5, 0.25).hint
    assert "MiB or GiB" in check.flash_attention(4096, 1, 0.25).hint
    assert "of the 4 before" in check.flash_attention(4, 1, 1).hint
    assert "on top" in check.flash_attention(4, 1, 1.25).hint
    assert not check.flash_attention("much", 1, 0.25).is_right


def least(operators: Mapping[str, Operator], budget_mib: int) -> set[str]:
    sets = (set(names) for size in range(10) for names in combinations(operators, size))
    enough = [s for s in sets if sum(operators[name].freed_mib for name in s) >= budget_mib]
    return min(enough, key=lambda names: sum(operators[name].gflop for name in names))


def greedy(operators: Mapping[str, Operator], budget_mib: int) -> set[str]:
    chosen: set[str] = set()
    for name in sorted(operators, key=lambda n: operators[n].gflop / operators[n].freed_mib):
        if sum(operators[one].freed_mib for one in chosen) < budget_mib:
            chosen.add(name)
    return chosen


def stub(*arguments: object) -> None: ...


def test_choose_operators() -> None:
    assert check.choose_operators(stub).status == "blank"
    assert check.choose_operators(least).is_right
    told = check.choose_operators(lambda operators, budget: set(operators)).hint
    assert "for 100 MiB: it can be done with 0.2 GFLOP" in told
    assert "frees 128 MiB only" in check.choose_operators(lambda o, b: {"norms"}).hint
    assert "'norm' is not one" in check.choose_operators(lambda o, b: {"norm"}).hint
    assert "keys of" in check.choose_operators(lambda o, b: set(o.values())).hint
    assert "a set of names" in check.choose_operators(lambda o, b: "norms").hint
    assert "ZeroDivisionError" in check.choose_operators(lambda o, b: 1 / 0).hint
    assert not check.choose_operators(7).is_right


def test_cheapest_bytes_first_is_not_always_least() -> None:
    assert "for 420 MiB: it can be done with 275.8 GFLOP" in check.choose_operators(greedy).hint


def test_utilisation() -> None:
    assert check.utilisation(..., ...).status == "blank"
    assert check.utilisation(0.32, 0.384).is_right
    assert "what the model needs" in check.utilisation(0.384, 0.384).hint
    assert "fewer tokens" in check.utilisation(0.4, 0.384).hint
    assert "that is MFU" in check.utilisation(0.32, 0.32).hint
    assert "how much longer" in check.utilisation(0.4 / 1.2, 0.384).hint
    assert "a fraction" in check.utilisation(32, 38.4).hint


def run(fixed_s: float, per_sequence_s: float, room_gib: float, kept_gib: float) -> tuple[str, int]:
    best, found = 0.0, ("none", 0)
    for mode, gib, factor in (("none", kept_gib, 1.0), ("full", kept_gib / 10, 1.25)):
        batch = int(room_gib / gib)
        rate = batch / (fixed_s + factor * per_sequence_s * batch) if batch else 0.0
        if rate > best:
            best, found = rate, (mode, batch)
    return found


def test_best_run() -> None:
    assert check.best_run(stub).status == "blank"
    assert check.best_run(run).is_right
    assert "TypeError" in check.best_run(lambda f, p, room, kept: f + "").hint
    assert not check.best_run(lambda f, p, room, kept: 3).is_right


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda f, p, room, kept: ("full", int(room / kept * 10)), "largest batch"),
        (lambda f, p, room, kept: ("none", int(room / kept)), "ten times the batch"),
        (lambda f, p, room, kept: "full", "a pair is wanted"),
        (lambda f, p, room, kept: run(f, p, room, kept)[::-1], "mode comes first"),
        (lambda f, p, room, kept: ("full", room / kept * 10), "whole number"),
        (
            lambda f, p, room, kept: max(
                (("none", int(room / kept)), ("full", int(10 * room / kept))),
                key=lambda one: one[1] / (1.25 if one[0] == "full" else 1) / (f + p * one[1]),
            ),
            "not `fixed_s`",
        ),
        (
            lambda f, p, room, kept: (
                ("none", int(room / kept)) if room > kept else ("full", int(10 * room / kept))
            ),
            "ten times the batch",
        ),
    ],
)
def test_best_run_tells_a_mistake(wrong: Callable[..., tuple[str, int]], hint: str) -> None:
    assert hint in check.best_run(wrong).hint
