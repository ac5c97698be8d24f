"""How are processes started by Accelerate, from a shell's command and from a notebook's cell?

    accelerate_launch("train.py", "--steps", 20, num_processes=2)       # as `accelerate launch`
    notebook_launch(train, config, num_processes=2)                     # [result, result]

    this process --lifeline pipe--> Accelerate's launcher (own session) --> N processes

Both run Accelerate's own launcher beside this process, started and stopped like any other job.
`accelerate.notebook_launcher` forks the process that calls it: a notebook's kernel has threads, and
perhaps a GPU, that do not survive that. So it is called by a fresh process here.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from labsupport.devices import choose_device, threads_per_rank
from labsupport.jobs import JobResult, _count, _environment, _Job, _new_log_dir
from labsupport.jobs.checks import check_job, steps_in
from labsupport.jobs.progress import ProgressBar


def accelerate_launch(
    program: str,
    *args: object,
    num_processes: int = 2,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    deadline_s: float | None = None,
) -> JobResult:
    """`accelerate launch --num_processes N program args`, a script or a module; else as `torchrun`.

    On the CPU the command needs --multi_gpu and ACCELERATE_USE_CPU: with --cpu it would start one
    process, however many are asked for, unless it finds MPI.
    """
    _check(program, num_processes, deadline_s)
    folder = _new_log_dir(log_dir)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--num_processes", str(num_processes), "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    if num_processes > 1:
        command += ["--multi_gpu"]
    kind = "--script" if program.endswith(".py") else "--module"
    command += ["-m", "labsupport.jobs.worker", str(folder), kind, program, *map(str, args)]
    num_threads = threads_per_rank(num_processes, threads, env={**os.environ, **(env or {})})
    bar = ProgressBar(
        steps_in(args), f"{_count(num_processes, 'rank')} × {_count(num_threads, 'thread')}"
    )
    return _run(command, folder, bar, num_processes, num_threads, env or {}, deadline_s)


def notebook_launch(
    function: Callable[..., Any],
    *args: Any,
    num_processes: int = 2,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float | None = 120.0,
) -> list[Any]:
    """`accelerate.notebook_launcher(function, args, num_processes)`; what each process returned.

    `function` may be defined in a cell. What it prints is shown, tagged by rank. Raises JobError
    with the traceback of the process that failed first, JobTimeout after `deadline_s`.
    """
    _check("labsupport.jobs", num_processes, deadline_s)
    folder = _new_log_dir(None)
    (folder / "work.pkl").write_bytes(cloudpickle.dumps((function, args)))
    command = [sys.executable, "-m", "labsupport.jobs.forker", str(folder), str(num_processes)]
    num_threads = threads_per_rank(num_processes, threads, env={**os.environ, **(env or {})})
    _run(command, folder, _LinesOnly(), num_processes, num_threads, env or {}, deadline_s)
    results = [folder / f"result{rank}.pkl" for rank in range(num_processes)]
    return [pickle.loads(result.read_bytes()) for result in results]


def _check(program: str, num_processes: int, deadline_s: float | None) -> None:
    """As for `torchrun`, in the words of Accelerate."""
    try:
        check_job(program, num_processes, 1, None, deadline_s)
    except ValueError as error:
        raise ValueError(str(error).replace("nproc_per_node", "num_processes")) from None


def _run(
    command: list[str],
    folder: Path,
    bar: ProgressBar,
    num_processes: int,
    num_threads: int,
    env: Mapping[str, str],
    deadline_s: float | None,
) -> JobResult:
    environment = _environment(num_threads, local=True, extra=env)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if choose_device(num_processes).device == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"
    with _Job.start(command, environment, folder) as job:
        return job.follow(bar, deadline_s=deadline_s, threads=num_threads)


class _LinesOnly(ProgressBar):
    """For a function that is no training run: what it prints, and no bar."""

    def __init__(self) -> None:
        pass

    def show(self, row: dict[str, Any]) -> None:
        self.write(str(row))

    def write(self, line: str) -> None:
        print(line)

    def close(self) -> None:
        pass
