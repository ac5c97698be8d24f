"""What was measured, over many runs, without mixing what must not be mixed?

ratio of two tables = median of the one / median of the other, if both carry one label and unit

runs = Store("runs/steps.jsonl").load()                 # a table: a row a measurement
runs.where(name="step", strategy="ddp").median()        # a Quantity with that label
runs.where(strategy="ddp").ratio(runs.where(strategy="by hand"))
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labsupport.results.manifest import RunManifest
from labsupport.results.quantity import Quantity, Value, is_number

FIELDS = ("name", "value", "unit", "label", "source")
SHOWN_ROWS = 20


@dataclass(frozen=True)
class Row:
    """One number, the run it belongs to, and what else was noted."""

    quantity: Quantity
    tags: Mapping[str, Value] = field(default_factory=dict, hash=False)
    manifest: RunManifest | None = None
    saved_at: str = ""
    """UTC, as in 2026-01-31T12:00:00+00:00."""

    def __getitem__(self, column: str) -> Value | None:
        """name, value, unit, label, source, or a tag (None where this row lacks it)."""
        return getattr(self.quantity, column) if column in FIELDS else self.tags.get(column)


@dataclass(frozen=True, repr=False)
class Table:
    """Rows in the order in which they were saved; shows itself as text or HTML."""

    rows: tuple[Row, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The five fields of a Quantity, then every tag of any row."""
        return (*FIELDS, *dict.fromkeys(tag for row in self.rows for tag in row.tags))

    def column(self, name: str) -> list[Any]:
        """One column, top to bottom; None where a row lacks the tag."""
        if name not in self.columns:
            raise ValueError(f"column {name!r} is unknown; choose one of {', '.join(self.columns)}")
        return [row[name] for row in self.rows]

    def where(self, **wanted: Value) -> Table:
        """Rows with these fields and tags, as in .where(label="measured", strategy="ddp")."""
        kept = [row for row in self.rows if all(row[key] == wanted[key] for key in wanted)]
        return Table(tuple(kept))

    def median(self) -> Quantity:
        """The middle of rows of one name, label, unit and source; ValueError for any others."""
        from statistics import median

        return self.aggregate(median)

    def aggregate(self, function: Callable[[Sequence[float]], float]) -> Quantity:
        """`function` (min, max, statistics.mean, …) of the values, with the label of all of them.

        Raises ValueError when name, label, unit or source differ, for words, and for no rows.
        """
        self._same("name", "label", "unit", "source")
        first = self.rows[0].quantity
        numbers = [row.quantity.value for row in self.rows]
        if not all(is_number(number) for number in numbers):
            raise ValueError(f"{first.name!r} is {first.value!r}: no number to take a median of")
        value = function([float(number) for number in numbers])
        return Quantity(first.name, value, first.unit, first.label, first.source)

    def ratio(self, other: Table) -> Quantity:
        """Median here / median there, with their common label.

        Raises ValueError for two labels or units: a prediction meets a measurement in `compare`.
        """
        Table(self.rows[:1] + other.rows[:1])._same("label", "unit")
        ours, theirs = self.median(), other.median()
        names = dict.fromkeys((ours.name, theirs.name))
        sources = dict.fromkeys((ours.source, theirs.source))
        value = float(ours.value) / float(theirs.value)
        return Quantity(" / ".join(names), value, "", ours.label, " / ".join(sources))

    def cells(self) -> list[tuple[str, ...]]:
        """Header and rows as text; a tag that a row lacks is left empty."""
        tags = self.columns[len(FIELDS) :]
        lines: list[tuple[str, ...]] = [("name", "value", "label", "source", *tags)]
        for row in self.rows[:SHOWN_ROWS]:
            quantity = row.quantity
            noted = [str(row.tags.get(tag, "")) for tag in tags]
            lines.append((quantity.name, quantity.text, quantity.label, quantity.source, *noted))
        return lines

    def __repr__(self) -> str:
        if not self.rows:
            return "no rows"
        lines = self.cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*text, *self._left_out()])

    def _repr_html_(self) -> str:
        if not self.rows:
            return "<p>no rows</p>"
        header, *lines = [[html.escape(text) for text in line] for line in self.cells()]
        head = "".join(f"<th>{text}</th>" for text in header)
        body = ["".join(f"<td>{text}</td>" for text in line) for line in lines]
        rows = "".join(f"<tr>{line}</tr>" for line in body)
        note = "".join(f"<p>{line}</p>" for line in self._left_out())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{note}"

    def _left_out(self) -> list[str]:
        more = len(self.rows) - SHOWN_ROWS
        return [f"… and {more} more rows"] if more > 0 else []

    def _same(self, *fields: str) -> None:
        if not self.rows:
            raise ValueError("the table has no rows; save some with Store(path).add(quantity)")
        for name in fields:
            found = list(dict.fromkeys(row[name] for row in self.rows))
            if len(found) > 1:
                shown = ", ".join(map(repr, found[:4]))
                raise ValueError(
                    f"rows have {len(found)} values of {name} ({shown}), which must not be mixed; "
                    f"choose one first, for example .where({name}={found[0]!r})"
                )
