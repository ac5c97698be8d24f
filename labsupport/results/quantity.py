"""What is this number: measured here, predicted, published, emulated, or recorded elsewhere?

    ratio = measured / predicted          1 says the model of the machine is right

    took = measured("all-reduce of 16 MiB", 0.021, "s", on="2 gloo ranks on this CPU")
    model = predicted("all-reduce of 16 MiB", 0.018, "s", by="latency + bytes / bandwidth")
    compare(0.010, took, model=model)       # a table: your guess, the model's, the measurement

Every Quantity carries one of five labels and says where it comes from. `compare` is the only place
where a prediction meets a measurement; a guess left as `...` gets a nudge, never an error.
"""

from __future__ import annotations

import html
import math
from contextlib import suppress
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, get_args

Label = Literal["measured", "predicted", "published", "emulated", "recorded"]
LABELS: tuple[str, ...] = get_args(Label)
Value = float | int | bool | str
NUDGE = (
    "No prediction yet: put yours in place of the dots and run the cell again. Wrong is welcome."
)


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
        object.__setattr__(self, "value", _plain(self.value, name=f"value of {self.name!r}"))
        if self.label not in LABELS:
            raise ValueError(f"label={self.label!r} is unknown; choose one of {', '.join(LABELS)}")
        if not self.name.strip() or not self.source.strip():
            raise ValueError(
                f"name={self.name!r} and source={self.source!r} must both say something, "
                f"for example source='2 gloo ranks on this CPU'"
            )
        if self.unit and not _is_number(self.value):
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


@dataclass(frozen=True, repr=False)
class Comparison:
    """Predictions beside a measurement; shows itself as a table, as text or HTML."""

    measured: Quantity
    model: Quantity | None = None
    prediction: Value | None = None
    """The learner's guess, in the unit of `measured`; None when left blank."""

    @property
    def ratio(self) -> float | None:
        """measured / your prediction; None when blank, no number, or zero."""
        return None if self.prediction is None else _ratio(self.measured.value, self.prediction)

    @property
    def model_ratio(self) -> float | None:
        """measured / the model's prediction; None without a model, for no number, or zero."""
        return None if self.model is None else _ratio(self.measured.value, self.model.value)

    @property
    def note(self) -> str:
        """What to do next; empty when there is a prediction."""
        return NUDGE if self.prediction is None else ""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Header and lines: who says it, value, measured / it, source."""
        now = self.measured
        last = "measured / it" if _is_number(now.value) else "as measured"
        lines = [("", "value", last, "source")]
        if self.prediction is None:
            lines.append(("your prediction", "...", "", ""))
        else:
            shown = format_value(self.prediction, now.unit)
            lines.append(("your prediction", shown, _verdict(now.value, self.prediction), "you"))
        if self.model is not None:
            verdict = _verdict(now.value, self.model.value)
            lines.append((self.model.label, self.model.text, verdict, self.model.source))
        lines.append((now.label, now.text, "", now.source))
        return lines

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{who:<{widths[0]}}  {value:>{widths[1]}}  {ratio:>{widths[2]}}  {source}".rstrip()
            for who, value, ratio, source in rows
        ]
        return "\n".join([self.measured.name, *lines, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        head = "".join(f"<th style='text-align:left'>{html.escape(text)}</th>" for text in header)
        body = "".join(
            "<tr>"
            + f"<th style='text-align:left;font-weight:normal'>{html.escape(row[0])}</th>"
            + "".join(f"<td style='text-align:right'>{html.escape(text)}</td>" for text in row[1:3])
            + f"<td style='text-align:left'>{html.escape(row[3])}</td></tr>"
            for row in rows
        )
        caption = f"<caption style='text-align:left'>{html.escape(self.measured.name)}</caption>"
        note = f"<p><em>{html.escape(self.note)}</em></p>" if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def compare(
    prediction: Value | EllipsisType | None, measured: Quantity, model: Quantity | None = None
) -> Comparison:
    """Put the learner's guess and the model's prediction beside what was measured.

    `prediction` is a number in the unit of `measured` (or a word, or True/False, where that is what
    was measured); `...` or None leaves it blank. `model` is a predicted or published Quantity.
    Raises ValueError for labels in the wrong place, different units, or a word beside a number.
    """
    if measured.label in ("predicted", "published"):
        raise ValueError(
            f"{measured.name!r} is {measured.label}; a comparison needs something measured, "
            f"emulated or recorded, for example measured({measured.name!r}, …)"
        )
    if model is not None and model.label not in ("predicted", "published"):
        raise ValueError(
            f"model {model.name!r} is {model.label}; it must be predicted or published, "
            f"for example predicted({model.name!r}, …, by='formula')"
        )
    if model is not None and model.unit != measured.unit:
        raise ValueError(
            f"model is in {model.unit!r} and the measurement in {measured.unit!r}; give both "
            f"in one unit, for example {measured.unit!r}"
        )
    guess = (
        None if prediction is None or prediction is ... else _plain(prediction, name="prediction")
    )
    others = (("prediction", guess), ("model", None if model is None else model.value))
    for who, value in others:
        if value is not None and _kind(value) != _kind(measured.value):
            raise ValueError(
                f"{who} {value!r} is {_kind(value)}, but {measured.name!r} is measured as "
                f"{_kind(measured.value)}, for example {measured.value!r}"
            )
    return Comparison(measured, model, guess)


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


def _plain(value: object, *, name: str) -> Value:
    """A Python number, word or yes/no, also from a scalar of numpy or torch."""
    item = getattr(value, "item", None)
    with suppress(ValueError, RuntimeError):  # more than one element: refused below, with its value
        value = item() if callable(item) else value
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{name} is {value!r}; it must be one number, word or yes/no, such as 1.5")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Value) -> str:
    return "a number" if _is_number(value) else "yes or no" if isinstance(value, bool) else "a word"


def _ratio(now: Value, before: Value) -> float | None:
    if isinstance(now, str) or isinstance(before, str) or isinstance(now, bool) or before == 0:
        return None
    return now / before


def _verdict(now: Value, before: Value) -> str:
    if not _is_number(now):
        return "yes" if str(now).casefold() == str(before).strip().casefold() else "no"
    ratio = _ratio(now, before)
    return "-" if ratio is None else _ratio_text(ratio)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= abs(ratio) < 100 else f"{ratio:.3g}"
