"""Is my answer right? Checks that read an exercise's answer and say: blank, right, or not yet.

    answer --> blank?  --> "blank"           (still the dots: Run All goes on)
           --> right?  --> "right"
           --> else    --> "not yet" + a hint, the one for your mistake if it is a known one

    from labsupport import checks
    checks.number(3.5, 4, hints={3.5: "that is the mean without the last rank"})
    checks.function(my_sum, cases=[((1, 2), 3)])

The exercises of one notebook have their checks in one file here, built from these. A check never
raises, whatever the answer is, and never gives the solution away.
"""

from __future__ import annotations

import dis
import html
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

Status = Literal["blank", "right", "not yet"]

BLANK_HINT = "Put your answer in place of the dots and run the cell again."


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a check found. Shows itself as one line."""

    status: Status
    hint: str = ""

    @property
    def is_right(self) -> bool:
        """True for "right" only."""
        return self.status == "right"

    def __repr__(self) -> str:
        return f"{self.status}: {self.hint}" if self.hint else self.status

    def _repr_html_(self) -> str:
        color = {"blank": "#888888", "right": "#2e7d32", "not yet": "#c77700"}[self.status]
        hint = f": {html.escape(self.hint)}" if self.hint else ""
        style = f"border-left:4px solid {color};padding:2px 8px"
        return f"<div style='{style}'><b>{self.status}</b>{hint}</div>"


def blank(hint: str = BLANK_HINT) -> Verdict:
    """Nothing there yet."""
    return Verdict("blank", hint)


def right(why: str = "") -> Verdict:
    """Correct; `why` may add what is worth remembering."""
    return Verdict("right", why)


def not_yet(hint: str) -> Verdict:
    """Wrong, with a hint that does not give the answer away."""
    return Verdict("not yet", hint)


def is_blank(answer: object) -> bool:
    """True for `...`, None, a list or dict with a `...` in it, and a function that is only a stub.

    A stub has a body of `...`, `pass`, `return ...` or `return None`; it is read, not called.
    """
    if answer is None or answer is ...:
        return True
    if isinstance(answer, Mapping):
        return any(value is ... for value in answer.values())
    if isinstance(answer, list | tuple | set):
        return any(value is ... for value in answer)
    return isinstance(answer, FunctionType) and _is_stub(answer)


def _is_stub(function: FunctionType) -> bool:
    steps = [step for step in dis.get_instructions(function) if step.opname not in _NO_EFFECT]
    names = [step.opname for step in steps]
    if names not in (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"]):
        return False
    return steps[0].argval is None or steps[0].argval is ...


_NO_EFFECT = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS"}


def number(
    answer: object,
    expected: float,
    *,
    rel: float = 0.01,
    hints: Mapping[float, str] | None = None,
    why: str = "",
) -> Verdict:
    """Right within the relative tolerance `rel` (for an expected 0: that far from it).

    `hints` maps known wrong numbers to what led there. A number may come from numpy or torch.
    """
    if is_blank(answer):
        return blank()
    value = _as_number(answer)
    if value is None:
        return not_yet(f"a number is wanted, this is {_kind(answer)}")
    if _close(value, expected, rel=rel):
        return right(why)
    for wrong, hint in (hints or {}).items():
        if _close(value, wrong, rel=rel):
            return not_yet(hint)
    return not_yet(_size_hint(value, expected))


def choice(
    answer: object, expected: str, *, hints: Mapping[str, str] | None = None, why: str = ""
) -> Verdict:
    """Right when the word is `expected`; capitals and outer spaces do not matter."""
    if is_blank(answer):
        return blank()
    if not isinstance(answer, str):
        return not_yet(f"a word in quotes is wanted, this is {_kind(answer)}")
    given = answer.strip().casefold()
    if given == expected.casefold():
        return right(why)
    known = {wrong.casefold(): hint for wrong, hint in (hints or {}).items()}
    return not_yet(known.get(given, "not this one"))


def numbers(
    answer: object, expected: Iterable[float], *, rel: float = 0.01, why: str = ""
) -> Verdict:
    """Right when every entry of a list (or array) is, in order; names the first that is not."""
    if is_blank(answer):
        return blank()
    wanted = [float(value) for value in expected]
    given = _as_list(answer)
    if given is None:
        return not_yet(f"a list of {len(wanted)} numbers is wanted, this is {_kind(answer)}")
    if len(given) != len(wanted):
        return not_yet(f"{len(wanted)} numbers are wanted, these are {len(given)}")
    for index, (one, want) in enumerate(zip(given, wanted, strict=True)):
        verdict = number(one, want, rel=rel)
        if not verdict.is_right:
            return not_yet(f"entry {index} (counted from 0): {verdict.hint}")
    return right(why)


def function(
    answer: object,
    cases: Iterable[tuple[tuple[Any, ...], Any]],
    *,
    rel: float = 0.01,
    same: Callable[[Any, Any], bool] | None = None,
    hint: str = "",
    why: str = "",
) -> Verdict:
    """Call the learner's function on every case, a pair (arguments, expected result).

    Numbers are compared within `rel`, lists and arrays entry by entry, the rest by ==; give
    `same(result, expected)` for another rule. What the function raises becomes the hint.
    """
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet(f"a function is wanted, this is {_kind(answer)}")
    for arguments, expected in cases:
        call = f"with {', '.join(_short(argument) for argument in arguments)}"
        try:
            result = answer(*arguments)
            if is_blank(result):
                return blank("The function still returns nothing: finish its last line.")
            matches = same(result, expected) if same else _matches(result, expected, rel=rel)
        except NotImplementedError:
            return blank()
        except Exception as error:
            where = inspect.trace()[-1]
            return not_yet(
                f"{call} it raises {type(error).__name__}: {error} (line {where.lineno})"
            )
        if not matches:
            return not_yet(f"{call} it gives {_short(result)}. {hint}".rstrip(". ") + ".")
    return right(why)


def _matches(result: Any, expected: Any, *, rel: float) -> bool:
    if _as_number(expected) is not None:
        return number(result, float(expected), rel=rel).is_right
    wanted, given = _as_list(expected), _as_list(result)
    if wanted is None or given is None:
        return wanted is None and bool(result == expected)
    pairs = zip(given, wanted, strict=False)
    return len(given) == len(wanted) and all(_matches(one, want, rel=rel) for one, want in pairs)


def _as_number(value: object) -> float | None:
    """A float, also from a scalar of numpy or torch; None for anything else, and for yes/no."""
    try:
        item = getattr(value, "item", None)
        plain: Any = item() if callable(item) else value
        is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
        return float(plain) if is_number else None
    except OverflowError:  # more digits than a float holds
        return math.inf
    except Exception:  # an array of several, or the learner's own odd object
        return None


def _as_list(value: Any) -> list[Any] | None:
    convert = getattr(value, "tolist", None)  # numpy and torch
    plain = convert() if callable(convert) else value
    return list(plain) if isinstance(plain, list | tuple | range) else None


def _close(value: float, expected: float, *, rel: float) -> bool:
    return math.isclose(value, expected, rel_tol=rel, abs_tol=rel if expected == 0 else 0.0)


def _size_hint(value: float, expected: float) -> str:
    if not math.isfinite(value):
        return "a finite number is wanted"
    for factor, mistake in _USUAL_FACTORS.items():
        if expected and _close(value / expected, factor, rel=1e-3):
            return mistake
    if expected and (value < 0) != (expected < 0) and value:
        return "look at the sign"
    return "too large" if value > expected else "too small"


_USUAL_FACTORS = {
    8.0: "8 times too large: bits or bytes?",
    1 / 8: "8 times too small: bits or bytes?",
    1000.0: "1000 times too large: which unit is asked for?",
    1 / 1000: "1000 times too small: which unit is asked for?",
    2**30 / 1e9: "off by 7%: GiB (2^30 bytes) or GB (10^9)?",
    1e9 / 2**30: "off by 7%: GiB (2^30 bytes) or GB (10^9)?",
}


def _kind(value: object) -> str:
    return f"{type(value).__name__} {_short(value)}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # the learner's own class may be broken too
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
