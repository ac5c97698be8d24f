"""What is this number: measured here, predicted, published, emulated, or recorded elsewhere?

a number is a value, a unit, one of five labels, and where it comes from

took = measured("all-reduce of 16 MiB", 0.021, "s", on="2 gloo ranks on this CPU")
took.text                               # '21 ms'
took                                    # all-reduce of 16 MiB: 21 ms (measured: 2 gloo …)
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

Label = Literal["measured", "predicted", "published", "emulated", "recorded"]
LABELS: tuple[str, ...] = get_args(Label)
Value = float | int | bool | str


@dataclass(frozen=True, repr=False)
class Quantity:
    """A number (or a word, or yes/no) with its unit, label and source.

    Raises ValueError for an unknown label, an empty name or source, a unit on what is no number.
    """

    name: str
    value: Value
    unit: str
    """"bytes", "s", "GB/s", "tokens/s", …; "" for a count, a ratio, a word or yes/no."""
    label: Label
    source: str
    """On what it was measured, by which formula, from which document, what was stood in for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", plain_value(self.value, name=f"value of {self.name!r}"))
        if self.label not in LABELS:
            raise ValueError(f"label={self.label!r} is unknown; choose one of {', '.join(LABELS)}")
        if not self.name.strip() or not self.source.strip():
            raise ValueError(
                f"name={self.name!r} and source={self.source!r} must both say something, "
                f"for example source='2 gloo ranks on this CPU'"
            )
        if self.unit and not is_number(self.value):
            raise ValueError(f"unit={self.unit!r} needs a number, not {self.value!r}; use unit=''")

    @property
    def text(self) -> str:
        """Value and unit for a person, as in "1.5 GiB"."""
        return format_value(self.value, self.unit)

    def __repr__(self) -> str:
        return f"{self.name}: {self.text} ({self.label}: {self.source})"


def measured(name: str, value: Value, unit: str = "", *, on: str = "this machine") -> Quantity:
    """Measured here and now, `on` which ranks and device."""
    return Quantity(name, value, unit, "measured", on)


def predicted(name: str, value: Value, unit: str = "", *, by: str) -> Quantity:
    """Computed `by` a formula or model before looking."""
    return Quantity(name, value, unit, "predicted", by)


def published(name: str, value: Value, unit: str = "", *, source: str) -> Quantity:
    """Taken from somebody's document."""
    return Quantity(name, value, unit, "published", source)


def emulated(name: str, value: Value, unit: str = "", *, stand_in: str) -> Quantity:
    """Measured with a part replaced: `stand_in` says which, as in "sleep for the compute"."""
    return Quantity(name, value, unit, "emulated", stand_in)


def recorded(name: str, value: Value, unit: str = "", *, on: str, date: str) -> Quantity:
    """Measured by the lab `on` another machine, at `date` (YYYY-MM-DD)."""
    return Quantity(name, value, unit, "recorded", f"{on}, {date}")


def format_value(value: Value, unit: str = "") -> str:
    """For a person: bytes in KiB/MiB/GiB (powers of 1024), seconds in µs/ms/s, four digits.

    >>> format_value(1536, "bytes"), format_value(0.0021, "s"), format_value(True)
    ('1.5 KiB', '2.1 ms', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    scales = _SCALES.get(unit, ())
    for size, name in scales:
        if abs(value) >= size:
            return f"{_four_digits(value / size)} {name}"
    return f"{_four_digits(value)} {unit}".rstrip()


_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
}


def _four_digits(value: float) -> str:
    if not math.isfinite(value) or (value != 0 and not 1e-4 <= abs(value) < 1e15):
        return f"{value:.4g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_value(value: object, *, name: str) -> Value:
    """A Python number, word or yes/no, also from a scalar of numpy or torch."""
    item = getattr(value, "item", None)
    with suppress(ValueError, RuntimeError):  # more than one element: refused below, with its value
        value = item() if callable(item) else value
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{name} is {value!r}; it must be one number, word or yes/no, such as 1.5")
    return value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
