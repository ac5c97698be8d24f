"""What are the ranks of a running job saying?

logs, bar = RankLogs(log_dir), ProgressBar(total_steps=20)
for rank, line in logs.new_lines():           # whole lines only
    row = parse_row(rank, line)               # {"rank": 0, "step": 3, "loss": 2.1} or None
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from labsupport.jobs.worker import FAILED

# gloo's C++ side prints this on every new group; it tells a learner nothing.
NOISE = re.compile(r"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.")


class RankLogs:
    """Reads what was added to LOG_DIR/rank*.log since the last look, by whole lines."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read_bytes: dict[Path, int] = {}
        self._failed: set[int] = set()

    @property
    def paths(self) -> dict[int, Path]:
        """Rank to log file, for the ranks that have started."""
        paths = self._log_dir.glob("rank*.log")
        found = {int(path.stem.removeprefix("rank")): path for path in paths}
        return dict(sorted(found.items()))

    def new_lines(self) -> list[tuple[int, str]]:
        """(rank, line) pairs in rank order; a line without its newline waits for it.

        The traceback that ends a failed rank is left out: `JobError` tells it.
        """
        return self._take(unfinished_too=False)

    def rest(self) -> list[tuple[int, str]]:
        """As `new_lines`, with a last line that never got its newline. For when the job is over."""
        return self._take(unfinished_too=True)

    def _take(self, *, unfinished_too: bool) -> list[tuple[int, str]]:
        taken = []
        for rank, path in self.paths.items():
            start = self._read_bytes.get(path, 0)
            if path.stat().st_size <= start:
                continue
            with path.open("rb") as log:
                log.seek(start)
                data = log.read()
            if not unfinished_too:
                data = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = start + len(data)
            for line in data.decode(errors="replace").split("\n"):
                if line == FAILED:
                    self._failed.add(rank)
                if rank in self._failed:
                    break
                shown = line.rstrip("\r").rsplit("\r", 1)[-1]  # a rank's own bar: its last state
                if shown and not NOISE.match(shown):
                    taken.append((rank, shown))
        return taken


def parse_row(rank: int, line: str) -> dict[str, Any] | None:
    """The row of a JSON line that has a "step" or a "done"; None for any other line."""
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {"rank": rank, **row} if "step" in row or "done" in row else None


class ProgressBar:
    """One tqdm bar for the whole job: steps done, loss, tokens/s.

    In a notebook it is one display that is updated in place, so a saved page keeps only the end of
    it and needs no widget; in a terminal it is tqdm's own bar on stderr.
    """

    def __init__(self, total_steps: int | None, description: str) -> None:
        from tqdm import tqdm

        self._handle: Any = None
        if in_notebook():
            from IPython.display import display

            self._handle = display({"text/plain": description}, raw=True, display_id=True)
            sink: Any = _Nowhere()
        else:
            sink = sys.stderr
        self._bar = tqdm(
            total=total_steps,
            desc=description,
            unit=" steps",
            file=sink,
            ascii=None if self._handle is None else False,
            ncols=None if self._handle is None else 110,
            mininterval=0.2,
            dynamic_ncols=self._handle is None,
        )
        self._latest_step = -1
        self._first_step = 0

    def show(self, row: dict[str, Any]) -> None:
        """Move on to the step that `row` tells of; fields it lacks are left out."""
        step = row.get("step")
        if not isinstance(step, int) or step <= self._latest_step:
            return
        if self._latest_step < 0:
            self._first_step = min(step, 1)  # programs count from 0 or from 1; both end at total
        parts = {}
        if isinstance(row.get("loss"), int | float):
            parts["loss"] = f"{row['loss']:.4g}"
        if isinstance(row.get("tokens_per_second"), int | float):
            parts["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
        self._bar.set_postfix(parts, refresh=False)
        self._latest_step = step
        done = step + 1 - self._first_step
        self._bar.update(done - self._bar.n)
        self._update_notebook()

    def write(self, line: str) -> None:
        """Print a line of output without breaking the bar."""
        if self._handle is None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line)

    def close(self) -> None:
        """Leave the bar in its last state."""
        self._bar.refresh()
        self._update_notebook()
        self._bar.close()

    def _update_notebook(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": str(self._bar)}, raw=True)


class _Nowhere:
    """Where tqdm writes when the notebook shows the bar."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def in_notebook() -> bool:
    """True inside a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
