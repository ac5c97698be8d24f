"""Two "nodes" on one machine: what does a slow cable between ranks really do?

    node 0 (own network namespace)                node 1 (own network namespace)
      ranks 0 .. k-1   eth0 10.77.0.1  =========  eth0 10.77.0.2   ranks k .. 2k-1
                                  tbf: 1 Gb/s each way

Linux gives each node a network of its own, joined by a virtual cable (veth) that `tc` slows down.
The link is slow for real: the numbers are `measured`; that there are two machines is `emulated`.

    if reason := can_make_nodes(): print(reason)         # "needs root ..."
    with two_nodes(processes_per_node=1) as nodes:       # a pool: .run as in labsupport.Ranks
        table = bench_collectives(nodes, max_bytes=2**24)

The namespaces have no name. Each lives as long as the process that holds it, and that process ends
when its owner closes it, or dies in any way: nothing stays behind that had to be found later.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
STORE_PORT = 29500
"""Fixed, and free: node 0's network is new and nobody else is in it."""
SET_UP_S = 10.0
STOP_S = 5.0
GIGABIT_PER_S = 10**9


class NodeError(RuntimeError):
    """A rank of a node failed, or did not answer in time; the message holds its traceback."""


def can_make_nodes() -> str | None:
    """None where `two_nodes` works here, else one line that says why not. Tries it: 0.1 s."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root; this process is another user"
    packages = {
        "ip": "iproute2",
        "tc": "iproute2",
        "unshare": "util-linux",
        "nsenter": "util-linux",
    }
    for tool, package in packages.items():
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed (package {package})"
    try:
        with two_nodes():
            return None
    except NodeError as error:
        return f"this kernel or container does not allow it: {error}"


@dataclass(frozen=True, kw_only=True)
class TwoNodes:
    """Two namespaces joined by a cable; `run` starts fresh processes in them each time."""

    processes_per_node: int
    rate_bits_per_s: int
    holders: tuple[int, int]
    """Process ids that keep the two namespaces alive."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks on both nodes together; rank r is on node r // processes_per_node."""
        return 2 * self.processes_per_node

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What the cable allows in each direction, headers included."""
        return self.rate_bits_per_s / 8

    @property
    def label(self) -> str:
        """Of every time that is taken on it."""
        return "measured"

    @property
    def how(self) -> str:
        """What was real and what was stood in for."""
        gbit = self.rate_bits_per_s / 1e9
        return f"two nodes emulated by namespaces, a real {gbit:g} Gb/s limit between"

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline_s: float | None = 120.0,
        collective_timeout_s: float = 30.0,
        **kwargs: Any,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank, gloo being up over the cable; one result per rank.

        Raises NodeError with the first failing rank's traceback, or when `deadline_s` has passed.
        """
        limit_s = 120.0 if deadline_s is None else deadline_s
        with tempfile.TemporaryDirectory(prefix="lab-nodes-") as folder, ExitStack() as stack:
            work = (fn, args, kwargs, collective_timeout_s)
            Path(folder, "work.pkl").write_bytes(cloudpickle.dumps(work))
            workers = [
                stack.enter_context(_child(self._command(rank, folder), self._env(rank)))
                for rank in range(self.world_size)
            ]
            _wait(workers, Path(folder), limit_s)
            return [
                pickle.loads(Path(folder, f"result{rank}.pkl").read_bytes())
                for rank in range(self.world_size)
            ]

    def _command(self, rank: int, folder: str) -> list[str]:
        inside = _inside(self.holders[rank // self.processes_per_node])
        return [*inside, sys.executable, "-m", "labsupport.measure.node_worker", folder]

    def _env(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(STORE_PORT),
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.processes_per_node),
            **self.env,
        }


@contextmanager
def two_nodes(
    *,
    processes_per_node: int = 1,
    rate_bits_per_s: int = GIGABIT_PER_S,
    env: Mapping[str, str] | None = None,
) -> Iterator[TwoNodes]:
    """Two nodes, each with `processes_per_node` ranks, joined by a link of `rate_bits_per_s`.

    `env` is set last on every rank, e.g. {"GLOO_SOCKET_IFNAME": "lo"} to see what a wrong interface
    does. Raises ValueError for numbers below 1 (1 Mb/s for the rate), NodeError where the machine
    does not allow namespaces (`can_make_nodes` says why).
    """
    if processes_per_node < 1 or rate_bits_per_s < 10**6:
        raise ValueError(
            f"{processes_per_node=} must be at least 1 and {rate_bits_per_s=} at least 1000000; "
            "1 and 10**9 work"
        )
    hold = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
    with ExitStack() as stack:
        pids = []
        for _ in range(2):
            holder = stack.enter_context(_child(hold, dict(os.environ), stdout=subprocess.PIPE))
            if _first_line(holder) != "ready":
                raise NodeError("unshare --net was refused (CAP_SYS_ADMIN is missing)")
            pids.append(holder.pid)
        _join(pids[0], pids[1], rate_bits_per_s)
        yield TwoNodes(
            processes_per_node=processes_per_node,
            rate_bits_per_s=rate_bits_per_s,
            holders=(pids[0], pids[1]),
            env=dict(env or {}),
        )


def _join(first: int, second: int, rate_bits_per_s: int) -> None:
    """Lay the cable between the namespaces of two processes and limit it in both directions."""
    ends = ["netns", str(first), "type", "veth", "peer", "name", INTERFACE, "netns", str(second)]
    _command(["ip", "link", "add", "name", INTERFACE, *ends])
    # A bucket of 1 ms of traffic, and no less than two of the largest packets that TCP hands over.
    burst_bytes = max(2 * 65536, rate_bits_per_s // 8000)
    limit = ["rate", f"{rate_bits_per_s}bit", "burst", f"{burst_bytes}b", "latency", "50ms"]
    for pid, address in zip((first, second), ADDRESSES, strict=True):
        inside = _inside(pid)
        _command([*inside, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
        _command([*inside, "ip", "link", "set", "lo", "up"])
        _command([*inside, "ip", "link", "set", INTERFACE, "up"])
        _command([*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit])


def _inside(pid: int) -> list[str]:
    """Words to put before a command so that it runs in the network namespace of `pid`."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _command(words: Sequence[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SET_UP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"`{' '.join(words)}` took more than {SET_UP_S} s") from error
    if done.returncode != 0:
        raise NodeError(f"`{' '.join(words)}`: {done.stderr.strip()}")


@contextmanager
def _child(
    words: Sequence[str], env: Mapping[str, str], *, stdout: int | None = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with this block, or with its owner, whose end closes its stdin."""
    child = subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal reaches the owner alone
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(timeout=STOP_S)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _first_line(child: subprocess.Popen[str]) -> str:
    """What the child says first; an empty string when it ended without a word."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _wait(workers: Sequence[subprocess.Popen[str]], folder: Path, deadline_s: float) -> None:
    """Until all ranks are done, one has failed, or the deadline has passed."""
    end = time.monotonic() + deadline_s
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            raise NodeError(_first_failure(codes, folder))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise NodeError(f"ranks {late} did not finish within {deadline_s} s and were stopped")
        time.sleep(0.02)


def _first_failure(codes: Sequence[int | None], folder: Path) -> str:
    """Traceback of the rank that wrote its error first, else the exit codes and last output."""
    errors = sorted(folder.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        rank = errors[0].stem.removeprefix("error")
        return f"rank {rank} failed\n{errors[0].read_text()}"
    ended = next(rank for rank, code in enumerate(codes) if code)
    log = folder / f"log{ended}.txt"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return f"rank {ended} ended with code {codes[ended]}\n{tail}"
