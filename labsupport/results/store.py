"""Where do measurements stay after the run, so that a later one can be laid beside them?

    one line of JSON = one Quantity + its tags + the manifest of its run + when it was saved

    store = Store("runs/steps.jsonl")
    store.add(measured("step", 0.021, "s", on="2 gloo ranks"), manifest, strategy="ddp")
    store.load()                            # a Table

Processes may add at once: each takes the lock of the file and appends one whole line. A line that
was cut off by a crash is reported by `load` and left out; the next one starts on a line of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from labsupport.results.manifest import RunManifest
from labsupport.results.quantity import Quantity, Value, plain_value
from labsupport.results.table import FIELDS, Row, Table

RESERVED = {*FIELDS, "manifest", "tags", "saved_at"}


@dataclass(frozen=True)
class Store:
    """A file of measurements; made, with its folder, by the first `add`."""

    path: str | Path

    def add(self, quantity: Quantity, manifest: RunManifest | None = None, **tags: Value) -> None:
        """Append one measurement. A tag is a number, word or yes/no, as in strategy="ddp"."""
        taken = RESERVED & set(tags)
        if taken:
            raise ValueError(f"tag {min(taken)!r} is a field of its own; use another name")
        noted = {name: plain_value(value, name=f"tag {name!r}") for name, value in tags.items()}
        record = {
            **asdict(quantity),
            "tags": noted,
            "manifest": None if manifest is None else manifest.to_dict(),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        _append(Path(self.path), json.dumps(record, ensure_ascii=False))

    def load(self) -> Table:
        """All that was added; empty when there is no file yet. Warns of damaged lines."""
        path = Path(self.path)
        if not path.exists():
            return Table()
        rows: list[Row] = []
        damaged: list[int] = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                rows.append(_row(line))
            except (ValueError, KeyError, TypeError):
                damaged.append(number)
        if damaged:
            where = f"line{'s' if len(damaged) > 1 else ''} {', '.join(map(str, damaged))}"
            warnings.warn(f"{path}: {where} damaged and left out", stacklevel=2)
        return Table(tuple(rows))


def _row(line: bytes) -> Row:
    record = json.loads(line)
    quantity = Quantity(**{name: record[name] for name in FIELDS})
    kept = record["manifest"]
    manifest = None if kept is None else RunManifest.from_dict(kept)
    return Row(quantity, dict(record["tags"]), manifest, str(record["saved_at"]))


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go of when the file is closed
        cut_off = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            cut_off = file.read(1) != b"\n"
        file.write(b"\n" * cut_off + line.encode() + b"\n")
