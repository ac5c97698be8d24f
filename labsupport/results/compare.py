"""How far off was the guess, and how far the model?

    ratio = measured / predicted          1 says the model of the machine is right

    took = measured("all-reduce of 16 MiB", 0.021, "s", on="2 gloo ranks on this CPU")
    model = predicted("all-reduce of 16 MiB", 0.018, "s", by="latency + bytes / bandwidth")
    compare(0.010, took, model=model)       # a table: your guess, the model's, the measurement

The one place where a prediction meets a measurement. A guess left as `...` gets a nudge, never an
error.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from types import EllipsisType

from labsupport.results.quantity import Quantity, Value, format_value, is_number, plain_value

NUDGE = (
    "No prediction yet: put yours in place of the dots and run the cell again. Wrong is welcome."
)


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
        last = "measured / it" if is_number(now.value) else "as measured"
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
        None
        if prediction is None or prediction is ...
        else plain_value(prediction, name="prediction")
    )
    others = (("prediction", guess), ("model", None if model is None else model.value))
    for who, value in others:
        if value is not None and _kind(value) != _kind(measured.value):
            raise ValueError(
                f"{who} {value!r} is {_kind(value)}, but {measured.name!r} is measured as "
                f"{_kind(measured.value)}, for example {measured.value!r}"
            )
    return Comparison(measured, model, guess)


def _kind(value: Value) -> str:
    return "a number" if is_number(value) else "yes or no" if isinstance(value, bool) else "a word"


def _ratio(now: Value, before: Value) -> float | None:
    if isinstance(now, str) or isinstance(before, str) or isinstance(now, bool) or before == 0:
        return None
    return now / before


def _verdict(now: Value, before: Value) -> str:
    if not is_number(now):
        return "yes" if str(now).casefold() == str(before).strip().casefold() else "no"
    ratio = _ratio(now, before)
    return "-" if ratio is None else _ratio_text(ratio)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= abs(ratio) < 100 else f"{ratio:.3g}"
