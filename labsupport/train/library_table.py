"""DeepSpeed beside torch's fully_shard, on one model: which holds, sends and takes how much?

    found = compare_libraries(ranks)                # a table, one row a recipe
    found.held_bytes("ZeRO-3")["gradients"], found.exchanged_bytes("ZeRO-3"), found.step_s("ZeRO-3")
    found.label                                     # "measured", or "recorded" where it is not here

Where DeepSpeed is not installed, the table is the one that the lab recorded on its own machine, and
says so. Bytes depend on the model alone; times belong to the machine.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labsupport.config import ModelConfig, TrainConfig
from labsupport.parallel import deepspeed
from labsupport.results import Row, Table, format_value, measured, recorded_runs
from labsupport.results.aligned import aligned_html, aligned_text
from labsupport.train.sharding_libraries import (
    CATEGORIES,
    COMPARED_CONFIG,
    COMPARED_MODEL,
    RECIPES,
    RecipeRun,
    run_recipe,
)

if TYPE_CHECKING:
    from labsupport.ranks import Ranks

SUITE = "sharding libraries"
"""Tag of the rows, in memory and in `recorded/`."""


@dataclass(frozen=True, repr=False)
class LibraryComparison:
    """A row a recipe; shows itself as a table, as text or HTML."""

    table: Table
    """One number a row; tags: suite, recipe, and what it is of."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """In the order in which they ran."""
        return tuple(dict.fromkeys(self.table.column("recipe")))

    @property
    def label(self) -> str:
        """measured, or recorded."""
        return self.table.rows[0].quantity.label

    def held_bytes(self, recipe: str) -> dict[str, int]:
        """Category -> bytes of the rank that held most, at its fullest moment."""
        return self._by("held", recipe)

    def exchanged_bytes(self, recipe: str) -> dict[str, int]:
        """Collective -> bytes that one rank handed to it in a step."""
        return self._by("exchanged", recipe)

    def step_s(self, recipe: str) -> float:
        """Median of some steps, of the slowest rank."""
        return self._one("step", recipe)

    def loss(self, recipe: str) -> float:
        """Of the last step that one process took too."""
        return self._one("loss", recipe)

    def weight_difference(self, recipe: str) -> float:
        """From one process, of any weight on any rank, relative to the largest of its tensor."""
        return self._one("difference of weights", recipe)

    def lines(self) -> list[tuple[str, ...]]:
        """Header and rows as text."""
        held = [f"{category} held" for category in CATEGORIES]
        found: list[tuple[str, ...]] = [
            ("recipe", *held, "sum", "exchanged a step", "step", "loss", "weights differ by")
        ]
        for recipe in self.recipes:
            bytes_of = self.held_bytes(recipe)
            sizes = [*(bytes_of[category] for category in CATEGORIES), sum(bytes_of.values())]
            sizes.append(sum(self.exchanged_bytes(recipe).values()))
            found.append(
                (
                    recipe,
                    *(format_value(size, "bytes") if size else "-" for size in sizes),
                    format_value(self.step_s(recipe), "s"),
                    f"{self.loss(recipe):.4f}",
                    f"{self.weight_difference(recipe):.0e}",
                )
            )
        return found

    @property
    def caption(self) -> str:
        """What the numbers are, and on what they were taken."""
        told = f"{self.label}: {self.table.rows[0].quantity.source}"
        return told if self.label == "measured" else f"{told}. {deepspeed.MISSING}."

    def __repr__(self) -> str:
        return f"{aligned_text(self.lines())}\n{self.caption}"

    def _repr_html_(self) -> str:
        head, *rows = self.lines()
        space, hyphen = "\N{NO-BREAK SPACE}", "\N{NON-BREAKING HYPHEN}"
        cells = [
            [name.replace("-", hyphen), *(number.replace(" ", space) for number in numbers)]
            for name, *numbers in rows
        ]
        return f"{aligned_html([head, *cells])}<p>{html.escape(self.caption)}</p>"

    def _rows(self, name: str, recipe: str) -> Table:
        rows = self.table.where(name=name, recipe=recipe)
        if not rows:
            raise ValueError(f"{recipe=} is not in the table; {', '.join(self.recipes)} are")
        return rows

    def _by(self, name: str, recipe: str) -> dict[str, int]:
        return {str(row["of"]): int(row.quantity.value) for row in self._rows(name, recipe)}

    def _one(self, name: str, recipe: str) -> float:
        return float(self._rows(name, recipe).rows[0].quantity.value)


def compare_libraries(
    ranks: Ranks,
    *,
    recipes: Sequence[str] = tuple(RECIPES),
    model: ModelConfig = COMPARED_MODEL,
    config: TrainConfig = COMPARED_CONFIG,
    steps: int = 3,
    timed_steps: int = 5,
) -> LibraryComparison:
    """Run `recipes` one after the other; what was recorded instead where DeepSpeed is missing.

    DeepSpeed changes torch in the processes that it runs in: give it ranks of its own, and close
    them. Raises ValueError for an unknown recipe.
    """
    unknown = [recipe for recipe in recipes if recipe not in RECIPES]
    if unknown or not recipes:
        raise ValueError(f"recipes={unknown} are unknown; choose from {', '.join(RECIPES)}")
    if not deepspeed.is_installed():
        table = recorded_comparison().table
        return LibraryComparison(Table(tuple(r for r in table.rows if r["recipe"] in recipes)))
    case: dict[str, Any] = {
        "model": model,
        "config": config,
        "steps": steps,
        "timed_steps": timed_steps,
    }
    on = f"{ranks.world_size} {ranks.backend} ranks on {ranks.device}"
    rows = []
    for recipe in recipes:
        rows += _rows_of(ranks.run(run_recipe, recipe, **case), recipe, on=on)
    return LibraryComparison(Table(tuple(rows)))


def recorded_comparison() -> LibraryComparison:
    """What the lab measured on its own machine. ImportError where nothing was recorded."""
    table = recorded_runs().where(suite=SUITE)
    if not table:
        raise ImportError(f"{deepspeed.MISSING}; nothing was recorded either")
    return LibraryComparison(table)


def _rows_of(runs: Sequence[RecipeRun], recipe: str, *, on: str) -> list[Row]:
    """Of several ranks the fullest, the slowest, the least equal."""
    fullest = max((run.held_bytes for run in runs), key=lambda held: sum(held.values()))
    numbers: list[tuple[str, float, str, str]] = [
        *(("held", size, "bytes", category) for category, size in fullest.items()),
        *(("exchanged", size, "bytes", name) for name, size in runs[0].exchanged_bytes.items()),
        ("loss", runs[0].losses[-1], "", "last step"),
        ("difference of weights", max(run.weight_difference for run in runs), "", "all"),
    ]
    step_s = max(run.step_s for run in runs)
    if not math.isnan(step_s):
        numbers.append(("step", step_s, "s", "median"))
    return [
        Row(measured(name, value, unit, on=on), {"suite": SUITE, "recipe": recipe, "of": of})
        for name, value, unit, of in numbers
    ]
