"""The first code of each rank of a job: own log file, own error file, then the program itself.

    python -m labsupport.jobs.worker LOG_DIR (--module NAME | --script PATH) ARGUMENTS...

Everything the rank writes (Python, C++, children) goes to LOG_DIR/rankR.log, whole lines at a time.
An exception is written to LOG_DIR/rankR.error.json with its time, so that the owner can tell which
rank failed first. SIGUSR1 writes the stack of every thread to the log.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from labsupport.jobs.lifeline import detach_stdin, watch_owner

FAILED = "--- this rank failed ---"
"""Line in a rank's log before its traceback, which the owner shows once and in its own place."""


def main(log_dir: Path, kind: str, program: str, args: list[str]) -> None:
    """Run `program` as `__main__` in this process; record how it failed, if it does."""
    watch_owner(detach_stdin())
    rank = os.environ["RANK"]
    redirect_output(log_dir / f"rank{rank}.log")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    error_file = log_dir / f"rank{rank}.error.json"
    signal.signal(signal.SIGTERM, lambda *_: leave(error_file))
    try:
        run_as_main(kind, program, args)
    except SystemExit as error:
        if error.code not in (None, 0):
            record_failure(error_file, f"SystemExit: {error.code}", "")
        raise
    except BaseException as error:
        record_exception(error_file, error)
        sys.exit(1)
    (log_dir / f"rank{rank}.done").touch()


def redirect_output(path: Path) -> None:
    """Send file descriptors 1 and 2 to the end of `path`, one write a line."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
        assert isinstance(stream, io.TextIOWrapper)
        # torchrun passes -u, under which print() writes a line and its newline separately.
        stream.reconfigure(line_buffering=True, write_through=False)
    os.close(log)


def run_as_main(kind: str, program: str, args: list[str]) -> None:
    """What `python -m program` or `python program` would do."""
    sys.argv = [program, *args]
    if kind == "--module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


def format_exception(error: BaseException) -> str:
    """The traceback without the frames of this file and of runpy, which started the program."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and _is_plumbing(frame):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _is_plumbing(frame: TracebackType) -> bool:
    name = frame.tb_frame.f_code.co_filename
    return name in (__file__, runpy.__file__) or name == "<frozen runpy>"


def record_exception(path: Path, error: BaseException) -> None:
    """Write an exception of the program to the error file and to the log."""
    text = format_exception(error)
    record_failure(path, f"{type(error).__name__}: {error}", text)
    print(FAILED, text, sep="\n", end="", file=sys.stderr)


def leave(error_file: Path) -> None:
    """On SIGTERM: end by it, but first tell of an exception that is on its way up.

    A rank that failed first and still cleans up would otherwise look like one that was stopped.
    """
    error = sys.exception()
    if error is not None and not error_file.exists():
        record_exception(error_file, error)
        sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def record_failure(path: Path, message: str, text: str) -> None:
    """Write what happened and when; a full disk must not hide the failure itself."""
    report = {"time": time.time(), "message": message, "traceback": text}
    try:
        path.write_text(json.dumps(report))
    except OSError as problem:
        sys.stderr.write(f"could not write {path}: {problem}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
