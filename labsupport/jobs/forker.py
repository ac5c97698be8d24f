"""The process that `accelerate.notebook_launcher` may fork: fresh, and no GPU touched.

Its one thread besides the main one only watches the owner; no child needs it.

    python -m labsupport.jobs.forker FOLDER NUM_PROCESSES       # by jobs.accelerate

FOLDER/work.pkl holds a function and its arguments; process r writes result<r>.pkl, and its output
and errors as every rank of a job does.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import cloudpickle

from labsupport.jobs.lifeline import watch_owner
from labsupport.jobs.worker import record_exception, redirect_output


def main(folder: Path, num_processes: int) -> None:
    """Hand the work to Accelerate."""
    watch_owner(0)
    from accelerate import notebook_launcher

    notebook_launcher(
        _work,
        (folder,),
        num_processes=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a port that is free, not 29500
    )


def _work(folder: Path) -> None:
    """In a forked process: call the function, leave its result."""
    rank = os.environ.get("RANK", "0")
    redirect_output(folder / f"rank{rank}.log")
    try:
        function, args = pickle.loads((folder / "work.pkl").read_bytes())
        result = cloudpickle.dumps(function(*args))
    except BaseException as error:
        record_exception(folder / f"rank{rank}.error.json", error)
        sys.exit(1)
    (folder / f"result{rank}.pkl").write_bytes(result)
    (folder / f"rank{rank}.done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
