"""Rules that settings must obey, each broken with the value, the rule, and a value that works.

at_least(1, steps=0)     # ValueError: steps=0 must be a whole number of at least 1, for example 2
"""

from __future__ import annotations

from typing import get_args


def require(fine: bool, name: str, value: object, rule: str, works: object) -> None:
    if not fine:
        raise ValueError(f"{name}={value!r} {rule}, for example {works!r}")


def at_least(smallest: int, **values: int) -> None:
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        rule = f"must be a whole number of at least {smallest}"
        require(whole and value >= smallest, name, value, rule, max(2, smallest))


def divides(name: str, part: int, whole_name: str, whole: int) -> None:
    works = max((n for n in range(1, min(part, whole) + 1) if whole % n == 0), default=1)
    require(whole % part == 0, name, part, f"must divide {whole_name}={whole}", works)


def one_of(name: str, value: str, literal: object) -> None:
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
