"""A stand-in for nvidia-smi: a shell script on PATH that answers as the real one does."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

LINK_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a shell script named nvidia-smi first on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def machine(
    names: list[str],
    *,
    memory_mib: int = 81559,
    used_mib: int = 500,
    link: str = "NV18",
    driver: str = "580.65.06",
    cuda: str = "13.0",
) -> str:
    """Script of a machine with these GPUs, all joined by the same link."""
    listing = "\n".join(f"GPU {i}: {name} (UUID: GPU-{i}abc)" for i, name in enumerate(names))
    query = "\n".join(
        f"{i}, {name}, {memory_mib}, {memory_mib - used_mib}, {driver}"
        for i, name in enumerate(names)
    )
    columns = "\t".join(f"GPU{i}" for i in range(len(names)))
    head = f"\t\033[4m{columns}\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m"
    rows = []
    for i in range(len(names)):
        cells = [" X " if i == j else link for j in range(len(names))]
        rows.append("\t".join([f"GPU{i}", *cells, "SYS\t0-51\t0\tN/A"]))
    nic = "\t".join(["NIC0", *("SYS" for _ in names), " X "])
    topology = "\n".join([head, *rows, nic, LINK_LEGEND])
    banner = f"| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda}  |"
    return f"""case "$1" in
-L) cat <<'END'
{listing}
END
;;
--query-gpu=*) cat <<'END'
{query}
END
;;
topo) cat <<'END'
{topology}
END
;;
*) echo '{banner}' ;;
esac"""


BROKEN = """echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9"""
HANGING = "exec sleep 60"
