"""What does a job give back, and what does it say when it fails?

result = torchrun("labsupport.train", "--steps", 20)      # JobResult
result.metrics.column("loss")                             # one number a step
result.log_paths[1].read_text()                           # all that rank 1 wrote
"""

from __future__ import annotations

import html
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a rank says when its peer is already gone. Such a rank is never named as the first to fail.
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|connection refused|remote process|"
    r"network error|peer .*(gone|exit)|socket.*closed|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)

WORKER = str(Path(__file__).with_name("worker.py"))


class Metrics(list[dict[str, Any]]):
    """The JSON rows that ranks printed, in order of arrival, each with its "rank"."""

    def column(self, name: str) -> list[Any]:
        """Values of one field, for the rows that have it."""
        return [row[name] for row in self if name in row]

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self for name in row))

    def _repr_html_(self, most: int = 12) -> str:
        """An HTML table of the first and last rows."""
        names = self._columns()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        shown: list[dict[str, Any] | None] = list(self)
        if len(shown) > most:
            shown = [*shown[: most // 2], None, *shown[-most // 2 :]]
        body = "".join(_html_row(row, names) for row in shown)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_row(row: dict[str, Any] | None, names: Sequence[str]) -> str:
    if row is None:
        return f'<tr><td colspan="{len(names)}">...</td></tr>'
    return f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))


@dataclass(frozen=True)
class JobResult:
    """A job that ended well. A job that failed raises `JobError` instead."""

    command: tuple[str, ...]
    returncode: int
    metrics: Metrics
    """Rows with a "step"."""
    summary: dict[str, Any]
    """The row that said {"done": true}; empty when none did."""
    log_paths: dict[int, Path]
    """Rank to the file that holds all it wrote to stdout and stderr."""
    seconds: float
    """Wall time from start to end, importing torch included."""
    threads_per_rank: int

    def __repr__(self) -> str:
        return (
            f"JobResult(ranks={len(self.log_paths)}, threads_per_rank={self.threads_per_rank}, "
            f"{len(self.metrics)} metric rows, {self.seconds:.1f} s, "
            f"logs in {self.log_dir})"
        )

    @property
    def log_dir(self) -> Path | None:
        """Folder of the log files; None when no rank of this machine wrote one."""
        return next((path.parent for path in self.log_paths.values()), None)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.metrics._repr_html_()}"


class JobError(RuntimeError):
    """A rank failed. The message holds its traceback, then one line a further rank."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        remote_traceback: str = "",
        others: Mapping[int, str] | None = None,
        returncode: int | None = None,
        log_paths: Mapping[int, Path] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The first rank that failed; None when the job failed before any rank ran."""
        self.remote_traceback = remote_traceback
        self.others = dict(others or {})
        """Rank to one line, for the ranks that failed or were stopped after the first."""
        self.returncode = returncode
        self.log_paths = dict(log_paths or {})

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's own traceback, not the way through this package."""
        return [f"{type(self).__name__}: {self}"]


class JobTimeout(JobError):
    """The job did not end within its deadline, and was stopped."""

    stacks: dict[int, str]
    """Rank to where its main thread stood, innermost call first."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended, from its own error file and from torchrun's verdict."""

    rank: int
    time: float
    summary: str
    traceback: str
    stopped: bool
    """torchrun ended it because another rank had failed."""

    @property
    def line(self) -> str:
        """One line for a rank that was not the first to fail."""
        return "stopped by torchrun" if self.stopped else self.summary.splitlines()[0]

    @property
    def is_consequence(self) -> bool:
        """True when it only tells that a peer had gone."""
        return self.stopped or CONSEQUENCE.search(self.summary) is not None


def read_failures(log_dir: Path) -> list[RankFailure]:
    """Failed ranks of a job, the one that failed first in front."""
    verdict_file = log_dir / "failures.json"
    verdicts = json.loads(verdict_file.read_text()) if verdict_file.exists() else {}
    failures = {}
    for rank, verdict in verdicts.items():
        code = int(verdict["exit_code"])
        failures[int(rank)] = RankFailure(
            int(rank), float(verdict["time"]), describe_exit(code), "", code == -signal.SIGTERM
        )
    for path in log_dir.glob("rank*.error.json"):
        report = json.loads(path.read_text())
        rank = int(path.name.removeprefix("rank").removesuffix(".error.json"))
        failures[rank] = RankFailure(
            rank, report["time"], report["message"], report["traceback"], False
        )
    return sorted(failures.values(), key=lambda f: (f.is_consequence, f.time, f.rank))


def describe_exit(code: int) -> str:
    """ "killed by SIGKILL" or "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL (often by the kernel, for want of memory)"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def job_error(log_dir: Path, returncode: int, log_paths: Mapping[int, Path]) -> JobError:
    """Tell of a job that torchrun reported as failed."""
    failures = read_failures(log_dir)
    if not failures:
        return JobError(
            f"torchrun {describe_exit(returncode)} before any rank failed; the end of "
            f"{log_dir / 'launcher.log'}:\n{tail(log_dir / 'launcher.log')}",
            returncode=returncode,
            log_paths=log_paths,
        )
    first, rest = failures[0], failures[1:]
    others = {failure.rank: failure.line for failure in rest}
    for rank in sorted(set(log_paths) - set(others) - {first.rank}):
        done = (log_dir / f"rank{rank}.done").exists()
        others[rank] = "ended normally" if done else "stopped by torchrun"
    evidence = first.traceback or (
        f"It left no traceback; its last lines:\n{tail(log_dir / f'rank{first.rank}.log')}\n"
    )
    lines = [f"  rank {rank}: {line}" for rank, line in sorted(others.items())]
    message = "\n".join(
        [
            f"rank {first.rank} failed: {first.summary}",
            "",
            evidence.rstrip(),
            *(["", "then:"] if lines else []),
            *lines,
            "",
            f"logs: {log_dir}",
        ]
    )
    return JobError(
        message,
        rank=first.rank,
        remote_traceback=evidence,
        others=others,
        returncode=returncode,
        log_paths=log_paths,
    )


def stack_in(path: Path) -> str:
    """The stack that SIGUSR1 wrote last into a rank's log, innermost call first."""
    text = path.read_text(errors="replace")
    _, found, stack = text.rpartition("Current thread ")
    frames = [line for line in stack.splitlines()[1:] if line.startswith("  File ")]
    own = [line for line in frames if "<frozen runpy>" not in line and WORKER not in line]
    return "\n".join(own) if found and own else tail(path)


def tail(path: Path, num_lines: int = 15) -> str:
    """Last lines of a log file; a placeholder where there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
