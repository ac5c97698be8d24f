"""What did the lab measure on machines that this one is not?

    measured there, on that day  ->  recorded, with machine and date as its source

    recorded_runs().where(name="mfu", strategy="ddp")       # empty where nothing was recorded

The files are `recorded/*.jsonl` beside the package; $LABSUPPORT_RECORDED names another folder.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from labsupport.results.quantity import recorded
from labsupport.results.store import Store
from labsupport.results.table import Row, Table


def recorded_folder() -> Path:
    """$LABSUPPORT_RECORDED, or `recorded` in the root of the repository."""
    given = os.environ.get("LABSUPPORT_RECORDED")
    return Path(given).expanduser() if given else Path(__file__).parents[2] / "recorded"


def recorded_runs(folder: str | Path | None = None) -> Table:
    """Every row of the files in `folder`, what was measured there relabelled `recorded`.

    Other labels stay: a prediction that was saved beside a measurement is still a prediction.
    """
    files = sorted(Path(folder or recorded_folder()).glob("*.jsonl"))
    return Table(tuple(_relabelled(row) for file in files for row in Store(file).load()))


def _relabelled(row: Row) -> Row:
    quantity, run = row.quantity, row.manifest
    if quantity.label != "measured":
        return row
    known = run is not None and run.hardware not in quantity.source
    on = f"{quantity.source}, {run.hardware}" if run is not None and known else quantity.source
    date = (run.started_at if run is not None else row.saved_at)[:10]
    moved = recorded(quantity.name, quantity.value, quantity.unit, on=on, date=date)
    return replace(row, quantity=moved)
