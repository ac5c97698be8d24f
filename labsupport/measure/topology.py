"""What connects the ranks of this machine: NVLink, PCIe, memory, or the link between sockets?

With GPUs the answer is `nvidia-smi topo -m`, read into places (GPUs, network cards) and the kind
of path between each two. Without, it is the CPUs of this process, by NUMA node, from /sys.

    topology = this_machine()
    topology.kind_between("GPU0", "GPU1")      # "NV18": 18 NVLinks; MEANING[...] says it in words
    plots.topology(topology)
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from labsupport.devices import gpu_count, nvidia_smi

MEANING = {
    "NV": "NVLink, the number says how many",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, not the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "across the link between CPU sockets",
    "MEMORY": "one memory: messages are copied in RAM",
}
"""What nvidia-smi's codes say, nearest first, and MEMORY for CPU ranks of one NUMA node."""

NEAREST_FIRST = tuple(MEANING)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Somewhere a rank or a message can be."""

    name: str
    kind: Literal["gpu", "nic", "core"]
    group: str
    """The NUMA node it belongs to; empty when unknown."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How two places reach each other."""

    first: str
    second: str
    kind: str
    """A key of MEANING; for NVLink with the number of links, as NV18."""

    @property
    def meaning(self) -> str:
        """The code in words."""
        return MEANING.get(re.sub(r"\d+$", "", self.kind), "unknown path")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Places and the paths between each two of them."""

    places: tuple[Place, ...]
    paths: tuple[Route, ...]
    source: str
    """What was read: "nvidia-smi topo -m" or "/sys"."""

    @property
    def groups(self) -> tuple[str, ...]:
        """NUMA nodes in order."""
        return tuple(dict.fromkeys(place.group for place in self.places))

    def kind_between(self, first: str, second: str) -> str | None:
        """The kind of path between two places, in either order; None when there is none."""
        wanted = {first, second}
        return next((p.kind for p in self.paths if {p.first, p.second} == wanted), None)


def this_machine() -> Topology:
    """GPUs where nvidia-smi shows some, else the CPUs that this process may use."""
    if gpu_count() > 0:
        answer = nvidia_smi("topo", "-m")
        if not answer.problem:
            return parse_nvidia_smi_topo(answer.stdout)
    return cpu_topology()


def parse_nvidia_smi_topo(text: str) -> Topology:
    """The matrix that `nvidia-smi topo -m` prints. Raises ValueError where there is none."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next((i for i, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if head is None:
        raise ValueError(f"no line with GPU0 at its top in {text[:80]!r}; use `nvidia-smi topo -m`")
    columns = [cell.strip() for cell in lines[head].split("\t")]
    names = [name for name in columns if re.fullmatch(r"(GPU|NIC)\d+", name)]
    table = {
        cells[0]: dict(zip(columns[1:], cells[1:], strict=False))
        for line in lines[head + 1 :]
        if (cells := [cell.strip() for cell in line.split("\t")])[0] in names
    }
    paths = tuple(
        Route(first=first, second=second, kind=table[first][second])
        for first, second in combinations(names, 2)
    )
    groups = {name: _numa_of(table[name]) for name in names if name.startswith("GPU")}
    places = tuple(
        Place(
            name=name,
            kind="gpu" if name.startswith("GPU") else "nic",
            group=groups.get(name) or _group_of_nearest(name, paths, groups),
        )
        for name in names
    )
    return Topology(places=places, paths=paths, source="nvidia-smi topo -m")


def cpu_topology(
    *, root: Path = Path("/sys/devices/system"), allowed: Collection[int] | None = None
) -> Topology:
    """The CPUs of `allowed` (default: this process's) by NUMA node, from /sys.

    Where there is no /sys (macOS) all CPUs are taken to share one memory.
    """
    cpus = sorted(_allowed_cpus() if allowed is None else allowed)
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted(root.glob("node/node[0-9]*"))
        for cpu in _cpu_list(folder / "cpulist")
    }
    places = tuple(
        Place(name=f"core {cpu}", kind="core", group=f"NUMA node {node_of.get(cpu, 0)}")
        for cpu in cpus
    )
    paths = tuple(
        Route(
            first=one.name, second=other.name, kind="MEMORY" if one.group == other.group else "SYS"
        )
        for one, other in combinations(places, 2)
    )
    return Topology(places=places, paths=paths, source="/sys" if node_of else "the number of CPUs")


def _allowed_cpus() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cpu_list(path: Path) -> list[int]:
    """ "0-2,8" -> [0, 1, 2, 8]."""
    cpus: list[int] = []
    for part in filter(None, path.read_text().strip().split(",")):
        low, _, high = part.partition("-")
        cpus += range(int(low), int(high or low) + 1)
    return cpus


def _numa_of(row: dict[str, str]) -> str:
    node = row.get("NUMA Affinity", "")
    return f"NUMA node {node}" if node.isdigit() else ""


def _group_of_nearest(name: str, paths: tuple[Route, ...], groups: dict[str, str]) -> str:
    """A network card's NUMA node: that of the GPU which reaches it by the shortest path."""
    reached = [
        (NEAREST_FIRST.index(path.kind), path.first)
        for path in paths
        if path.second == name and path.first in groups and path.kind in NEAREST_FIRST[:-2]
    ]
    return groups[min(reached)[1]] if reached else ""
