"""How ranks are started: forked from a template where that is safe, else as plain processes.

    launcher = choose_launcher()
    pid = launcher.start(spec)
    launcher.signal(pid, signal.SIGINT); launcher.tell(pid, "unblock")

Forking a process that has imported torch is what makes a rank start in tens of milliseconds.
`choose_launcher` is the one place that decides whether it may be done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import IO, Any, Protocol

from labsupport.ranks.spec import RankSpec

START_TIMEOUT_S = 120.0


class Launcher(Protocol):
    """Starts ranks and is the only one to signal them."""

    def start(self, spec: RankSpec) -> int: ...
    def signal(self, pid: int, number: int) -> None: ...
    def tell(self, pid: int, text: str) -> None: ...
    def exit_codes(self, pids: Iterable[int]) -> dict[int, int | None]:
        """Those of `pids` that have ended: pid -> exit code, None if nobody could report it."""
        ...

    def alive(self) -> bool:
        """Whether `start` can work."""
        ...

    def close(self) -> None: ...


class ForkLauncher:
    """Owns one template process and asks it to fork ranks."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labsupport.ranks.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # A notebook's Interrupt goes to its process group; the pool forwards it itself.
            start_new_session=True,
            env=_template_environment(),
        )
        self._started: dict[tuple[str, int], int] = {}  # (folder, rank) -> pid, not yet fetched
        self._unwanted: set[tuple[str, int]] = set()
        self._refused: dict[tuple[str, int], str] = {}
        self._pids: set[int] = set()
        self._ended: dict[int, int | None] = {}
        self._unread = b""

    def start(self, spec: RankSpec) -> int:
        """Fork one rank; its pid. Raises RuntimeError with the template's own words."""
        key = (spec.folder, spec.rank)
        self._send({"fork": asdict(spec)})
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                self._messages(timeout_s=0.0 if key in self._started else 1.0)
                if key in self._started:
                    return self._started.pop(key)
                if not self.alive() or key in self._refused:
                    break
        except BaseException:  # interrupted: the rank may still come, and nobody waits for it
            self._unwanted.add(key)
            raise
        self._log.seek(0)
        words = self._refused.pop(key, "") or self._log.read().decode(errors="replace").strip()
        raise RuntimeError(f"the process that ranks are forked from has failed:\n{words}")

    def signal(self, pid: int, number: int) -> None:
        self._send({"signal": pid, "number": number})

    def tell(self, pid: int, text: str) -> None:
        self._send({"tell": pid, "text": text})

    def exit_codes(self, pids: Iterable[int]) -> dict[int, int | None]:
        self._messages(timeout_s=0.0)
        if not self.alive():  # the ranks died with it
            self._ended |= dict.fromkeys(self._pids)
            self._pids.clear()
        return {pid: self._ended[pid] for pid in pids if pid in self._ended}

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the template ends its ranks, then itself
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `exit_codes` and `start` find the template gone

    def _messages(self, *, timeout_s: float) -> None:
        """Take in what the template has said, waiting a little if it has not."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        taken = 0
        while select.select([fd], [], [], 0.0 if taken else timeout_s)[0]:
            content = os.read(fd, 1 << 16)
            if not content:
                break
            *lines, self._unread = (self._unread + content).split(b"\n")
            for message in map(json.loads, lines):
                self._take_in(message)
                taken += 1

    def _take_in(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._pids.discard(message["ended"])
            self._ended[message["ended"]] = message["code"]
            return
        key = (message["folder"], message["rank"])
        if "pid" not in message:
            self._refused[key] = message["refused"]
            return
        pid = message["pid"]
        self._ended.pop(pid, None)  # a number that an earlier rank had
        self._pids.add(pid)
        self._started[key] = pid
        if key in self._unwanted:
            self.signal(pid, signal.SIGKILL)


class SpawnLauncher:
    """Starts each rank as a fresh process: slower, but safe wherever forking is not."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)

    def start(self, spec: RankSpec) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "labsupport.ranks.spawned"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,
            env=_template_environment(),
        )
        self._processes[process.pid] = process
        # Not as an argument, where other users could read the environment.
        self.tell(process.pid, json.dumps(asdict(spec)))
        return process.pid

    def signal(self, pid: int, number: int) -> None:
        process = self._processes.get(pid)
        if process is None or process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            process.send_signal(number)

    def tell(self, pid: int, text: str) -> None:
        process = self._processes.get(pid)
        if process is not None and process.stdin is not None:
            try:
                process.stdin.write(text.encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended; `exit_codes` says so

    def exit_codes(self, pids: Iterable[int]) -> dict[int, int | None]:
        processes = [self._processes[pid] for pid in pids]
        return {p.pid: p.returncode for p in processes if p.poll() is not None}

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        for pid, process in self._processes.items():
            self.signal(pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._processes.clear()
        self._log.close()


def choose_launcher() -> Launcher:
    """Fork on Linux. On macOS a forked process may not use the system's own libraries safely."""
    return ForkLauncher() if sys.platform == "linux" else SpawnLauncher()


_prestarted: Launcher | None = None


def prestart() -> None:
    """Start a launcher in the background, for all pools of this process to share."""
    global _prestarted
    if _prestarted is None or not _prestarted.alive():
        _prestarted = choose_launcher()


def prestarted() -> Launcher | None:
    return _prestarted if _prestarted is not None and _prestarted.alive() else None


def _template_environment() -> dict[str, str]:
    """This process's environment, without what would start threads in the template."""
    return os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(_package_path()),
    }


def _package_path() -> list[str]:
    """So that `-m labsupport…` finds this package also where it is not installed."""
    import labsupport

    here = os.path.dirname(os.path.dirname(os.path.abspath(labsupport.__file__)))
    return [here, *filter(None, [os.environ.get("PYTHONPATH")])]
