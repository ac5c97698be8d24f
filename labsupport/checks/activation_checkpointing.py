"""Checks of notebook 05: segments, flash attention, a budget, utilisation, when it is free.

from labsupport.checks import activation_checkpointing as check
check.best_segment(2, 7.25)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from labsupport.checks import Verdict, blank, function, is_blank, not_yet, number, right

NUM_LAYERS, RATIO, INPUT_MIB = 96, 34, 64


def best_segment(segment: object, peak_gib: object) -> Verdict:
    """96 blocks, each keeping 34 times its input of 64 MiB: blocks a segment, and the peak."""
    if is_blank(segment) or is_blank(peak_gib):
        return blank()
    which = number(
        segment,
        2,
        rel=1e-9,
        hints={
            10: "√96: that is for layers which keep no more than their input",
            **dict.fromkeys((1, 3, 4), "write down the sum for 1, 2 and 3"),
            57: "√(L · layer / input)? the dearer a layer, the shorter the segment",
        },
    )
    if not which.is_right:
        return not_yet(f"segment: {which.hint}")
    peak = (NUM_LAYERS // 2 + 2 * RATIO) * INPUT_MIB / 1024
    hints = {
        2 * RATIO * INPUT_MIB / 1024: "and the inputs of the segments?",
        NUM_LAYERS / 2 * INPUT_MIB / 1024: "and the segment that is being computed again?",
        (NUM_LAYERS + 2 * RATIO) * INPUT_MIB / 1024: "one input a segment, not one a block",
        1024 * peak: "MiB or GiB?",
        NUM_LAYERS / 2 + 2 * RATIO: "counted in inputs; an input takes 64 MiB",
        peak * 2**30 / 1e9: "GiB (2^30) is asked for",
    }
    verdict = number(peak_gib, peak, rel=0.01, hints=hints)
    if not verdict.is_right:
        return not_yet(f"peak: {verdict.hint}")
    return right("Every block on its own takes 8.1 GiB; keeping everything 204.")


HEADS, SEQ_LEN = 32, 8192


def flash_attention(scores_gib: object, kept_mib: object, more_products: object) -> Verdict:
    """One block, one sequence of 8192, 32 heads: scores in bf16, log-sums in fp32, 5 for 4."""
    if any(is_blank(one) for one in (scores_gib, kept_mib, more_products)):
        return blank()
    scores = number(
        scores_gib,
        HEADS * SEQ_LEN**2 * 2 / 2**30,
        hints={
            SEQ_LEN**2 * 2 / 2**30: "of one head; there are 32",
            HEADS * SEQ_LEN**2 * 4 / 2**30: "bf16 takes 2 bytes",
            HEADS * SEQ_LEN**2 * 2 / 1e9: "GiB (2^30) is asked for",
            HEADS * SEQ_LEN**2 * 2 / 2**20: "MiB or GiB?",
        },
    )
    if not scores.is_right:
        return not_yet(f"scores: {scores.hint}")
    kept = number(
        kept_mib,
        HEADS * SEQ_LEN * 4 / 2**20,
        hints={
            HEADS * SEQ_LEN * 2 / 2**20: "the log-sums are fp32",
            SEQ_LEN * 4 / 2**20: "of one head; there are 32",
            HEADS * SEQ_LEN * 4 / 2**10: "KiB or MiB?",
        },
    )
    if not kept.is_right:
        return not_yet(f"kept: {kept.hint}")
    more = number(
        more_products,
        0.25,
        hints={
            1.25: "the share that comes on top",
            0.2: "of the 4 that there would be anyway",
            1: "one product more, as a share of the 4 before",
            25: "a fraction is wanted: 0.1 for 10%",
        },
    )
    if not more.is_right:
        return not_yet(f"products: {more.hint}")
    return right("4 GiB against 1 MiB. So selective keeps its result, which is small and dear.")


@dataclass(frozen=True)
class Operator:
    """What forgetting an operator's results frees, and what computing them again costs."""

    freed_mib: int
    gflop: float


def operators() -> dict[str, Operator]:
    """Made-up figures of one large block, near those of a Llama in bf16."""
    return {
        "norms": Operator(128, 0.2),
        "rotary": Operator(40, 0.1),
        "swiglu product": Operator(224, 0.5),
        "v": Operator(16, 69.0),
        "up": Operator(112, 962.0),
        "gate": Operator(112, 962.0),
        "o": Operator(32, 275.0),
        "attention": Operator(33, 275.0),
        "q": Operator(32, 275.0),
    }


_BUDGETS_MIB = (100, 300, 400, 420, 500)


def choose_operators(answer: Any) -> Verdict:
    """`choose(operators, budget_mib)`: names that free at least the budget for the least FLOPs."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return function(answer, [])
    fault = ""

    def fits(result: Any, least_gflop: float) -> bool:
        nonlocal fault
        fault = _fault(result, budget, least_gflop)
        return not fault

    for budget in _BUDGETS_MIB:
        case = ((operators(), budget), _least_gflop(operators(), budget))
        verdict = function(answer, [case], same=fits)
        if not verdict.is_right:
            return not_yet(f"for {budget} MiB: {fault}") if fault else verdict
    return right(
        "The cheap three free 392 MiB for 0.8 GFLOP. A MiB beyond costs thousands of times as much."
    )


def _fault(result: object, budget_mib: int, least_gflop: float) -> str:
    """What is wrong with a choice; empty when it is as cheap as any."""
    known = operators()
    if isinstance(result, str) or not isinstance(result, Collection):
        return "a set of names is wanted"
    if any(isinstance(one, Operator) for one in result):
        return "names are wanted, the keys of `operators`, such as 'norms'"
    names = {str(name) for name in result}
    if not names <= set(known):
        return f"{sorted(names - set(known))[0]!r} is not one of the operators"
    freed, gflop = _sum(known, names)
    if freed < budget_mib:
        return f"your choice frees {freed} MiB only"
    if gflop > least_gflop * 1.0001:
        return f"it can be done with {least_gflop:,.1f} GFLOP instead of {gflop:,.1f}"
    return ""


def _sum(known: Mapping[str, Operator], names: Iterable[str]) -> tuple[int, float]:
    chosen = [known[name] for name in names]
    return sum(one.freed_mib for one in chosen), sum(one.gflop for one in chosen)


def _least_gflop(known: Mapping[str, Operator], budget_mib: int) -> float:
    sets = (names for size in range(len(known) + 1) for names in combinations(known, size))
    sums = (_sum(known, names) for names in sets)
    return min(gflop for freed, gflop in sums if freed >= budget_mib)


def utilisation(mfu_after: object, hfu_after: object) -> Verdict:
    """Before: both 40%. Then a fifth more FLOPs, in a step that is 1.25 times as long."""
    if is_blank(mfu_after) or is_blank(hfu_after):
        return blank()
    for name, value, expected, hints in (
        (
            "MFU",
            mfu_after,
            0.40 / 1.25,
            {
                0.40 * 1.2 / 1.25: "that is HFU: MFU counts only what the model needs",
                0.40: "the step takes longer: fewer tokens a second",
                0.40 / 1.2: "a fifth more FLOPs, but how much longer is the step?",
                0.40 * 0.75: "a quarter more time is not a quarter less speed",
                0.40 * 1.25: "a longer step gives fewer tokens a second",
            },
        ),
        (
            "HFU",
            hfu_after,
            0.40 * 1.2 / 1.25,
            {
                0.40 / 1.25: "that is MFU: HFU counts what is computed again, too",
                0.40 * 1.2: "the step takes longer",
                0.40: "a fifth more FLOPs, in a quarter more time",
            },
        ),
    ):
        percent = {100 * expected: "a fraction is wanted: 0.4 for 40%"}
        verdict = number(value, expected, rel=0.005, hints={**hints, **percent})
        if not verdict.is_right:
            return not_yet(f"{name}: {verdict.hint}")
    return right("The device is nearly as busy as before; the model gets a fifth less of it.")


Run = tuple[str, int]
Case = tuple[float, float, float, float]


def best_run(answer: Any) -> Verdict:
    """`best_run(fixed_s, per_sequence_s, room_gib, kept_gib)` -> ("none" or "full", batch)."""
    if is_blank(answer):
        return blank()
    cases = [(case, _best_run(*case)) for case in _RUNS]
    verdict = function(answer, cases, same=_same_run, why=_RUNS_WHY)
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    known = (hint for wrong, hint in _WRONG_RUNS if _gives(answer, wrong))
    hint = _form_hint(answer) or next(known, "")
    return not_yet(hint) if hint else verdict


FULL_TIME = 1.25
_RUNS: tuple[Case, ...] = (
    (0.5, 0.25, 40.5, 10.0),
    (0.0, 0.25, 40.5, 10.0),
    (0.1, 0.25, 40.5, 10.0),
    (2.0, 0.1, 24.2, 5.0),
    (0.5, 0.25, 9.5, 10.0),
    (0.282, 0.25, 40.5, 10.0),  # "full" by a hair; not if the fixed part grew by 1.25 as well
)
_RUNS_WHY = (
    "It pays where a larger batch shares a fixed price of the step (weights to gather, "
    "small kernels), or where nothing fits without."
)


def _fitting(room_gib: float, kept_gib: float) -> list[Run]:
    """The largest batch of each mode that fits at all."""
    runs = [("none", int(room_gib / kept_gib)), ("full", int(room_gib / (kept_gib / 10)))]
    return [run for run in runs if run[1]]


def _factor(run: Run) -> float:
    return FULL_TIME if run[0] == "full" else 1.0


def _step_s(run: Run, fixed_s: float, per_sequence_s: float) -> float:
    return fixed_s + _factor(run) * per_sequence_s * run[1]


def _best_run(fixed_s: float, per_sequence_s: float, room_gib: float, kept_gib: float) -> Run:
    fitting = _fitting(room_gib, kept_gib)
    return max(fitting, key=lambda run: run[1] / _step_s(run, fixed_s, per_sequence_s))


def _same_run(result: Any, expected: Run) -> bool:
    return isinstance(result, tuple | list) and tuple(result) == expected


_LARGER = "compare with 'full', which fits ten times the batch"
_WRONG_RUNS: tuple[tuple[Callable[..., Run], str], ...] = (
    (
        lambda f, p, room, kept: _fitting(room, kept)[-1],
        "the largest batch is not always the fastest: compare sequences a second",
    ),
    (lambda f, p, room, kept: _fitting(room, kept)[0], _LARGER),
    (lambda f, p, room, kept: ("none", int(room / kept)), _LARGER),
    (
        lambda f, p, room, kept: max(
            _fitting(room, kept), key=lambda run: run[1] / (_factor(run) * (f + p * run[1]))
        ),
        "only `per_sequence_s` is 1.25 times as long, not `fixed_s`",
    ),
)


def _form_hint(answer: Callable[..., Any]) -> str:
    """What is wrong with the form of a result; empty when it is a mode and a whole number."""
    try:
        result = answer(*_RUNS[0])
    except Exception:  # whatever it raises, `function` has told it
        return ""
    if not isinstance(result, tuple | list) or len(result) != 2:
        return "a pair is wanted, such as ('none', 3)"
    if not isinstance(result[0], str) or result[0] not in ("none", "full"):
        return "the mode comes first and is 'none' or 'full', then the batch"
    if isinstance(result[1], float) and not result[1].is_integer():
        return "a batch is a whole number of sequences: round down"
    return ""


def _gives(answer: Callable[..., Any], wrong: Callable[..., Run]) -> bool:
    try:
        return all(_same_run(answer(*case), wrong(*case)) for case in _RUNS)
    except Exception:  # whatever it raises, `function` has told it
        return False
