"""A slow cable where none can be laid: real ranks, real messages, and a pause for each crossing.

    ranks 0 .. k-1 "node 0"   ==== one cable, a lane each way ====   ranks k .. 2k-1 "node 1"

A message to the other node first waits for its node's lane, then pauses bytes / rate, then goes.
Two ranks of a node that send at once share the lane, as they would share a network card. Messages
inside a node go at once. The pause is a stand-in, so times measured here are labelled `emulated`.

    with two_nodes_or_emulation(ranks) as nodes:    # namespaces where allowed, else this
        print(nodes.label, nodes.how)
        bench_collectives(nodes, collectives=(RING_ALL_REDUCE,))

Only point-to-point messages pass the cable (`measure.links` builds its collectives from them).
The library's own collectives talk below Python, where nothing can make them wait.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from labsupport.measure.nodes import GIGABIT_PER_S, TwoNodes, can_make_nodes, two_nodes


class RanksPool(Protocol):
    """`labsupport.Ranks`."""

    @property
    def world_size(self) -> int: ...
    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class EmulatedNodes:
    """The ranks of a pool, the first half as node 0 and the others as node 1; `run` as there."""

    pool: RanksPool
    rate_bits_per_s: int
    folder: Path
    """Holds a file a node: the lock of its lane, and the bytes that went through."""
    reason: str
    """Why there are no real ones."""

    @property
    def world_size(self) -> int:
        """Ranks on both nodes together."""
        return self.pool.world_size

    @property
    def processes_per_node(self) -> int:
        """Half of them."""
        return self.pool.world_size // 2

    @property
    def label(self) -> str:
        """Of every time that is taken on it."""
        return "emulated"

    @property
    def how(self) -> str:
        """What was real and what was stood in for."""
        gbit = self.rate_bits_per_s / 1e9
        pause = f"a pause of bytes / {gbit:g} Gb/s for each message across"
        return f"ranks of one machine, {pause} ({self.reason})"

    @property
    def count_cable_bytes(self) -> Callable[[], int]:
        """To be called on a rank: bytes that its node has sent across so far."""
        return partial(_crossed_bytes, self.folder, self.processes_per_node)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank, its messages to the other node slowed down."""
        deadline_s = kwargs.pop("deadline_s", None)
        work = partial(
            _on_cable, fn, self.folder, self.processes_per_node, self.rate_bits_per_s / 8
        )
        return self.pool.run(work, *args, deadline_s=deadline_s, **kwargs)


@contextmanager
def two_nodes_or_emulation(
    pool: RanksPool, *, rate_bits_per_s: int = GIGABIT_PER_S
) -> Iterator[TwoNodes | EmulatedNodes]:
    """Two nodes of `pool.world_size / 2` ranks: of their own where allowed, else `pool`'s."""
    reason = can_make_nodes()
    if reason is not None:
        with emulated_nodes(pool, rate_bits_per_s=rate_bits_per_s, reason=reason) as emulated:
            yield emulated
        return
    half = pool.world_size // 2
    with two_nodes(processes_per_node=half, rate_bits_per_s=rate_bits_per_s) as nodes:
        yield nodes


@contextmanager
def emulated_nodes(
    pool: RanksPool,
    *,
    rate_bits_per_s: int = GIGABIT_PER_S,
    reason: str = "no namespaces asked for",
) -> Iterator[EmulatedNodes]:
    """Two nodes made of a pool's ranks. Raises ValueError for an odd number or a rate below 1 Mb/s.

    The files of the lanes are gone afterwards.
    """
    if pool.world_size < 2 or pool.world_size % 2 or rate_bits_per_s < 10**6:
        raise ValueError(
            f"{pool.world_size=} must be even and {rate_bits_per_s=} at least 1000000; "
            "4 and 10**9 work"
        )
    with tempfile.TemporaryDirectory(prefix="lab-cable-") as folder:
        for node in (0, 1):
            _lane(Path(folder), node).write_text("0")
        yield EmulatedNodes(
            pool=pool, rate_bits_per_s=rate_bits_per_s, folder=Path(folder), reason=reason
        )


def _on_cable(
    fn: Callable[..., Any],
    folder: Path,
    processes_per_node: int,
    bytes_per_s: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """On a rank: `fn` with every point-to-point send to the other node slowed down."""
    k, node = processes_per_node, dist.get_rank() // processes_per_node
    send, method = dist.ProcessGroup.send, vars(dist.ProcessGroup)["send"]

    def slow_send(
        group: Any, tensors: list[torch.Tensor], destination: int, *rest: Any, **named: Any
    ) -> Any:
        if destination // k != node:
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            _cross(_lane(folder, node), size_bytes, bytes_per_s)
        return send(group, tensors, destination, *rest, **named)

    setattr(dist.ProcessGroup, "send", slow_send)  # noqa: B010
    try:
        return fn(*args, **kwargs)
    finally:
        setattr(dist.ProcessGroup, "send", method)  # noqa: B010


def _cross(lane: Path, size_bytes: int, bytes_per_s: float) -> None:
    """Wait for the lane, take it for bytes / rate, and add to its count."""
    with lane.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes
        passed = int(file.read()) + size_bytes
        file.seek(0)
        file.write(str(passed))
        time.sleep(size_bytes / bytes_per_s)


def _crossed_bytes(folder: Path, processes_per_node: int) -> int:
    """What this rank's node has sent across so far."""
    with _lane(folder, dist.get_rank() // processes_per_node).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return int(file.read())


def _lane(folder: Path, node: int) -> Path:
    return folder / f"from-node-{node}"
