"""The process that ranks are forked from: it has imported torch once, and starts nothing.

    {"fork": {…RankSpec…}}            -> {"pid": 1234, "folder": "/tmp/…", "rank": 0}
    {"signal": 1234, "number": 2}
    {"tell": 1234, "text": "unblock"}                                  one JSON object a line
                                      -> {"ended": 1234, "code": -9}   when a rank has ended

It holds no CUDA context and no Python thread, which makes forking it safe. It is the parent of
every rank, so only it can signal one without hitting a stranger. When its standard input ends, the
owner is gone: it kills its ranks and ends. When it is killed itself, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
from typing import Any

import tqdm.auto  # noqa: F401 (before ipykernel: a bar of text, for widgets cannot be shown from a rank)

from labsupport.ranks import child
from labsupport.ranks.spec import RankSpec

PR_SET_PDEATHSIG = 1
POLL_S = 0.2


class Template:
    """Forks ranks on command and watches them."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}  # pid -> write end of the rank's standard input
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folders: set[str] = set()
        self._unread = b""
        self._wake: tuple[int, int] = (-1, -1)

    def run(self) -> None:
        """Serve until the owner's end of standard input is closed."""
        # A child that ends wakes the loop; Ctrl-C in a terminal is the owner's business.
        wake_read, wake_write = self._wake = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        owner = os.getppid()
        while os.getppid() == owner:  # a child of the owner may hold our standard input open
            readable, _, _ = select.select([0, wake_read], [], [], POLL_S)
            if wake_read in readable:
                os.read(wake_read, 4096)
            if 0 in readable and not self._read_commands():
                break
            self._report_ended()
        for pid in list(self._lines):
            _signal_group(pid, signal.SIGKILL)
        for folder in self._folders:  # an owner that was killed could not do it
            shutil.rmtree(folder, ignore_errors=True)

    def _read_commands(self) -> bool:
        content = os.read(0, 1 << 16)
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(content)

    def _obey(self, command: dict[str, Any]) -> None:
        if "fork" in command:
            spec = RankSpec(**command["fork"])
            self._folders.add(spec.folder)
            try:
                pid = self._fork(spec)
            except OSError as error:  # the limit on processes, for example
                _say(folder=spec.folder, rank=spec.rank, refused=str(error))
            else:
                _say(folder=spec.folder, rank=spec.rank, pid=pid)
        elif "signal" in command and command["signal"] in self._lines:
            number = command["number"]
            if number == signal.SIGKILL:
                _signal_group(command["signal"], number)  # what the rank has started goes too
            else:
                os.kill(command["signal"], number)
        elif "tell" in command and command["tell"] in self._lines:
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                os.write(self._lines[command["tell"]], command["text"].encode() + b"\n")

    def _fork(self, spec: RankSpec) -> int:
        line_read, line_write = os.pipe()
        gc.freeze()  # keeps the pages that parent and child share from being copied
        try:
            pid = os.fork()
        except OSError:
            os.close(line_read)
            os.close(line_write)
            raise
        if pid:
            os.close(line_read)
            self._lines[pid] = line_write
            return pid
        try:
            os.setsid()
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(line_read, 0)
            # A line ends only once nobody holds its other end: this rank must not.
            for fd in (line_read, line_write, *self._wake, *self._lines.values()):
                os.close(fd)
            child.serve(spec)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    def _report_ended(self) -> None:
        while self._lines:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._lines:
                os.close(self._lines.pop(pid))
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started and left behind
                _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _signal_group(pid: int, number: int) -> None:
    """Signal a rank and what it has started; it may be between fork and setsid."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
            return
        except ProcessLookupError:
            continue


def _say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    Template().run()
    os._exit(0)  # nothing is left to tidy up, and torch takes its time to
