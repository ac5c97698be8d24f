"""How do I run one training program on N ranks, watch it, and stop it?

    from labsupport.jobs import torchrun
    result = torchrun("labsupport.train", "--steps", 20, nproc_per_node=2)
    result.metrics.column("loss")

    this process --lifeline pipe--> torchrun (own session) --> N workers (a session each)

The job's processes are started, stopped and, should this process die, ended together. Rendezvous is
on the loopback interface, on a port that the system chooses and torchrun holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from labsupport.devices import loopback_interface, threads_per_rank
from labsupport.jobs.checks import check_job, steps_in
from labsupport.jobs.progress import ProgressBar, RankLogs, parse_row
from labsupport.jobs.result import (
    JobError,
    JobResult,
    JobTimeout,
    Metrics,
    job_error,
    stack_in,
    tail,
)

__all__ = ["JobError", "JobResult", "JobTimeout", "Metrics", "torchrun"]

SHUTDOWN_S = 3  # torchrun's patience with its workers after SIGTERM
GRACE_S = 6.0  # ours with torchrun, before SIGKILL
SHARED_ID = "lab"  # of a job over several nodes: each starts its part, and all must name it alike


def torchrun(
    program: str,
    *args: object,
    nproc_per_node: int = 2,
    nnodes: int = 1,
    rdzv_endpoint: str | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    deadline_s: float | None = None,
    total_steps: int | None = None,
) -> JobResult:
    """Run a module ("labsupport.train") or a script ("path/to/train.py") under torchrun.

    JSON lines of the ranks that have a "step" become the progress bar and `JobResult.metrics`; all
    other lines are printed, tagged by rank. `args` are turned into strings. `env` is added to the
    ranks' environment; `threads` is for each rank (default: OMP_NUM_THREADS, else a fair share of
    the allowed CPUs). With `nnodes` above 1 it starts this machine's part and waits for the others
    at `rdzv_endpoint` ("host:port").

    Raises ValueError before anything starts; JobError when a rank fails, JobTimeout after
    `deadline_s`. On these, and on an interrupt, every process of the job is ended first.
    """
    check_job(program, nproc_per_node, nnodes, rdzv_endpoint, deadline_s)
    num_threads = threads_per_rank(nproc_per_node, threads, env={**os.environ, **(env or {})})
    folder = _new_log_dir(log_dir)
    endpoint = rdzv_endpoint or "127.0.0.1:0"
    command = [sys.executable, "-m", "labsupport.jobs.launcher", str(folder)]
    command += [f"--nnodes={nnodes}", f"--nproc-per-node={nproc_per_node}"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={folder.name if nnodes == 1 else SHARED_ID}",
    ]
    if nnodes == 1:
        command += ["--local-addr=127.0.0.1", "--rdzv-conf=is_host=1"]
    command += [f"--shutdown-timeout={SHUTDOWN_S}", f"--log-dir={folder / 'torchrun'}"]
    is_script = program.endswith(".py")
    command += ["-m", "labsupport.jobs.worker", str(folder)]
    command += ["--script" if is_script else "--module", program, *map(str, args)]
    description = f"{_count(nproc_per_node, 'rank')} × {_count(num_threads, 'thread')}"
    bar = ProgressBar(total_steps or steps_in(args), description)
    environment = _environment(num_threads, local=nnodes == 1, extra=env or {})
    with _Job.start(command, environment, folder) as job:
        return job.follow(bar, deadline_s=deadline_s, threads=num_threads)


def _new_log_dir(log_dir: str | Path | None) -> Path:
    """A fresh folder for one job, under `log_dir` or under the system's temporary folder."""
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="job-", dir=log_dir)).resolve()


def _environment(num_threads: int, *, local: bool, extra: Mapping[str, str]) -> dict[str, str]:
    """What the ranks inherit: this interpreter, their threads, gloo on loopback unless told."""
    chosen = {"OMP_NUM_THREADS": str(num_threads), "PYTHON_EXEC": sys.executable}
    if local and "GLOO_SOCKET_IFNAME" not in extra:  # what the shell says may be for other hosts
        chosen["GLOO_SOCKET_IFNAME"] = loopback_interface()
    return {**os.environ, **extra, **chosen}


@dataclass
class _Job:
    """One running torchrun, and the pipe by which it and its workers know that we live."""

    process: subprocess.Popen[bytes]
    lifeline: int
    log_dir: Path
    started: float

    @classmethod
    def start(cls, command: list[str], env: dict[str, str], log_dir: Path) -> _Job:
        reading_end, writing_end = os.pipe()  # neither is inherited but as the launcher's stdin
        try:
            with (log_dir / "launcher.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=reading_end,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
        except BaseException:
            os.close(writing_end)
            raise
        finally:
            os.close(reading_end)
        return cls(process, writing_end, log_dir, time.monotonic())

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, bar: ProgressBar, *, deadline_s: float | None, threads: int) -> JobResult:
        """Show what the ranks say until they end; then give the result or raise."""
        logs, rows = RankLogs(self.log_dir), Metrics()
        try:
            while self.process.poll() is None:
                self._show(logs.new_lines(), bar, rows)
                if deadline_s is not None and time.monotonic() - self.started > deadline_s:
                    raise self._timeout(deadline_s, logs, rows)
                time.sleep(0.05)
            self._show(logs.rest(), bar, rows)
        except KeyboardInterrupt as interrupt:
            self.stop()
            interrupt.add_note(f"the job was stopped; logs: {self.log_dir}")
            raise
        finally:
            bar.close()
        seconds = time.monotonic() - self.started
        if self.process.returncode != 0:
            raise job_error(self.log_dir, self.process.returncode, logs.paths)
        summary = next((row for row in reversed(rows) if row.get("done")), {})
        steps = Metrics(row for row in rows if "step" in row and not row.get("done"))
        command = tuple(str(part) for part in self.process.args)  # type: ignore[union-attr]
        return JobResult(command, 0, steps, summary, logs.paths, seconds, threads)

    def _show(self, lines: list[tuple[int, str]], bar: ProgressBar, rows: Metrics) -> None:
        for rank, line in lines:
            row = parse_row(rank, line)
            if row is None:
                bar.write(f"[rank {rank}] {line}")
            else:
                rows.append(row)
                bar.show(row)

    def _timeout(self, deadline_s: float, logs: RankLogs, rows: Metrics) -> JobTimeout:
        """Ask each rank for its stack, which lands in its log, and put the logs' ends together."""
        for worker in self._descendants():
            if "labsupport.jobs.worker" in _command_line(worker) and logs.paths:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    worker.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        stacks = {rank: stack_in(path) for rank, path in logs.paths.items()}
        ends = [f"rank {rank} is at (innermost first):\n{text}" for rank, text in stacks.items()]
        where = (
            "\n".join(ends)
            or f"no rank started (did all nodes come?); torchrun:\n{tail(self._launcher_log)}"
        )
        error = JobTimeout(
            f"the job did not end within {deadline_s:g} s and was stopped; rows of metrics so far: "
            f"{len(rows)}.\n{where}\nlogs: {self.log_dir}",
            log_paths=logs.paths,
        )
        error.stacks = stacks
        return error

    @property
    def _launcher_log(self) -> Path:
        return self.log_dir / "launcher.log"

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End every process of the job: SIGTERM through torchrun, then SIGKILL for what is left."""
        descendants = self._descendants()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            descendants += self._descendants()
        finally:  # a second interrupt comes here at once
            if self.lifeline >= 0:
                os.close(self.lifeline)
                self.lifeline = -1
            if self.process.poll() is None:
                self.process.kill()
            for process in descendants:
                try:
                    process.kill()  # psutil makes sure that the pid still is this process
                except psutil.NoSuchProcess:
                    continue
            self.process.wait()
            psutil.wait_procs(descendants, timeout=2.0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
