"""What is this number, how far was the guess, and which run does it belong to?

    took = measured("step", 0.021, "s", on="2 gloo ranks on this CPU")       # quantity.py
    compare(0.010, took)                    # your guess beside it             compare.py
    Store("runs/steps.jsonl").add(took, manifest, strategy="ddp")            # store.py

Every Quantity carries one of five labels and says where it comes from; `compare` is the only place
where a prediction meets a measurement, and a table of stored ones (table.py) never mixes labels. A
RunManifest (manifest.py) says which data, settings and code a run had; `recorded_runs`
(recordings.py) finds what the lab measured on other machines.
"""

from labsupport.results.compare import NUDGE, Comparison, compare
from labsupport.results.manifest import RunManifest, differences
from labsupport.results.quantity import (
    LABELS,
    Label,
    Quantity,
    Value,
    emulated,
    format_value,
    measured,
    predicted,
    published,
    recorded,
)
from labsupport.results.recordings import recorded_runs
from labsupport.results.store import Store
from labsupport.results.table import Row, Table

__all__ = [
    "LABELS",
    "NUDGE",
    "Comparison",
    "Label",
    "Quantity",
    "Row",
    "RunManifest",
    "Store",
    "Table",
    "Value",
    "compare",
    "differences",
    "emulated",
    "format_value",
    "measured",
    "predicted",
    "published",
    "recorded",
    "recorded_runs",
]
