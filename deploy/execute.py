"""Execute notebooks in place and save their outputs: what `make notebooks` runs.

    .venv/bin/python deploy/execute.py notebooks/00_start_here.ipynb

A notebook is written only when all its cells ran (a cell tagged raises-exception may raise), so a
failure leaves the committed outputs as they were. Times of day are not recorded: they would change
every file at every run. Prints the run time of each notebook, the README's figures.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_TIMEOUT_S = 300


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    # The widgets of the last run: nbclient replaces them only if this run makes any.
    notebook.metadata.pop("widgets", None)
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    _leave_out_live_widgets(notebook)
    nbformat.validate(notebook)
    fresh = path.with_suffix(".fresh")
    nbformat.write(notebook, fresh)
    os.replace(fresh, path)  # an interrupt leaves the old file or the new one, never half of one


def _leave_out_live_widgets(notebook: nbformat.NotebookNode) -> None:
    """Keep the picture and the line of text; a widget without its kernel is only an error there."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if len(data) > 1:
                data.pop("application/vnd.jupyter.widget-view+json", None)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    failed = []
    for path in parser.parse_args().notebooks:
        started = time.monotonic()
        try:
            execute(path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed.append(path.name)
            print(f"{path}: failed\n{error}", file=sys.stderr, flush=True)
        else:
            print(f"{path}: {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print(f"execute: not saved: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
