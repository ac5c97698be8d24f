"""GPUs and the links between them, CPUs, memory, shared memory and disk: is there enough?

check_shm(facts)              # Check("/dev/shm", "warn", "64 MiB ...", "--shm-size")
parse_topology(output)               # {(0, 1): "NV18"} from `nvidia-smi topo -m`
for check in MACHINE_CHECKS: print(check(facts))
"""

from __future__ import annotations

import re
from collections import Counter

from labsupport.doctor.facts import Facts
from labsupport.doctor.report import Check
from labsupport.hardware import accelerator_of

MIB, GIB = 2**20, 2**30
LITTLE_SHM, LITTLE_MEMORY, TOO_LITTLE_MEMORY = 512 * MIB, 4 * GIB, 1 * GIB
LITTLE_DISK, TOO_LITTLE_DISK = 10 * GIB, 1 * GIB

LINK_NAMES = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe between host bridges of one NUMA node",
    "SYS": "PCIe and the link between CPU sockets",
}


def check_driver(facts: Facts) -> Check:
    """The GPU driver answers, where there is one."""
    if not facts.smi_found:
        return Check("gpu driver", "ok", "none (no nvidia-smi), CPU tier")
    if facts.smi_problem:
        return Check(
            "gpu driver",
            "warn",
            f"{facts.smi_problem}; the lab runs on the CPU",
            "if this machine has a GPU, install or reload its driver (sudo modprobe nvidia); "
            "in a container, start it with --gpus all",
        )
    serves = f", serves CUDA {facts.driver_cuda}" if facts.driver_cuda else ""
    return Check("gpu driver", "ok", f"{facts.driver_version or 'version unknown'}{serves}")


def check_gpus(facts: Facts) -> Check:
    """Which GPUs there are, and whether somebody else fills them."""
    hidden = f"{facts.gpus_hidden} hidden by CUDA_VISIBLE_DEVICES" if facts.gpus_hidden else ""
    if not facts.gpus:
        return Check("gpus", "ok", f"none, CPU tier{' (' + hidden + ')' if hidden else ''}")
    parts = []
    for gpu in facts.gpus:
        known = accelerator_of(gpu.name, gpu.memory_total_bytes)
        sheet = "" if known is None else f", {known.memory_bandwidth_gb_per_s:,.0f} GB/s"
        memory = f"{_gib(gpu.memory_free_bytes)} of {_gib(gpu.memory_total_bytes)} free"
        parts.append(f"{gpu.index}: {gpu.name} ({memory}{sheet})")
    detail = "; ".join([*parts, *([hidden] if hidden else [])])
    crowded = [g.index for g in facts.gpus if g.memory_free_bytes < g.memory_total_bytes / 2]
    if crowded:
        listed = ", ".join(map(str, crowded))
        return Check(
            "gpus",
            "warn",
            f"{detail}; more than half of GPU {listed} is in use",
            "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses other GPUs",
        )
    return Check("gpus", "ok", detail)


def check_links(facts: Facts) -> Check:
    """What connects each pair of GPUs, by `nvidia-smi topo -m`."""
    if len(facts.gpus) < 2:
        return Check("gpu links", "ok", "none: fewer than two GPUs")
    visible = {gpu.index for gpu in facts.gpus}
    links = {
        pair: kind for pair, kind in parse_topology(facts.topology).items() if visible >= set(pair)
    }
    if not links:
        return Check(
            "gpu links", "warn", "nvidia-smi topo -m gave no table", "try it by hand: it may hang"
        )
    counts = Counter(links.values())
    if len(counts) == 1:
        (kind,) = counts
        return Check("gpu links", "ok", f"all {len(links)} pairs: {describe_link(kind)}")
    pairs = "; ".join(f"{a}-{b}: {describe_link(kind)}" for (a, b), kind in sorted(links.items()))
    return Check("gpu links", "ok", pairs)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of GPU indices (low, high) to nvidia-smi's code: NV18, PIX, PXB, PHB, NODE, SYS."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if "GPU0" in line.split()), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    links = {}
    for line in lines:
        words = line.split()
        if not words or words == header or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        row = int(words[0][3:])
        for column, kind in zip(columns, words[1:], strict=False):
            if row < column:
                links[row, column] = kind
    return links


def describe_link(kind: str) -> str:
    """ "NV18" -> "NV18 (18 NVLinks)"."""
    if re.fullmatch(r"NV\d+", kind):
        return f"{kind} ({kind[2:]} NVLink{'s'[: kind != 'NV1']})"
    return f"{kind} ({LINK_NAMES[kind]})" if kind in LINK_NAMES else kind


def check_cpus(facts: Facts) -> Check:
    """At least two CPUs, so that two ranks can run at the same time."""
    of = "" if facts.cpus_allowed == facts.cpus_total else f" of {facts.cpus_total}"
    why = " (CPU affinity or cgroup quota)" if of else ""
    detail = f"{facts.cpus_allowed}{of} allowed{why}"
    if facts.cpus_allowed < 2:
        return Check(
            "cpus",
            "warn",
            f"{detail}: two ranks take turns, so timings say little",
            "allow 2 CPUs; in a container, --cpus 2",
        )
    return Check("cpus", "ok", detail)


def check_memory(facts: Facts) -> Check:
    """Room for a notebook, a few ranks with torch in each, and a model server."""
    limited = " (cgroup limit)" if facts.memory_is_limited else ""
    detail = (
        f"{_gib(facts.memory_available_bytes)} available of "
        f"{_gib(facts.memory_total_bytes)}{limited}"
    )
    fix = "close other programs, or allow more; in a container, --memory 8g"
    if facts.memory_available_bytes < TOO_LITTLE_MEMORY:
        return Check("memory", "fail", f"{detail}; two ranks with torch need 1 GiB", fix)
    if facts.memory_available_bytes < LITTLE_MEMORY:
        return Check("memory", "warn", f"{detail}; 8 ranks or a model server need 4 GiB", fix)
    return Check("memory", "ok", detail)


def check_shm(facts: Facts) -> Check:
    """NCCL, data loaders and vLLM hand over data in /dev/shm; containers give it 64 MB."""
    if facts.shm_total_bytes is None or facts.shm_free_bytes is None:
        return Check("/dev/shm", "ok", "no /dev/shm on this system")
    total, free = facts.shm_total_bytes, facts.shm_free_bytes
    detail = f"/dev/shm: {_gib(free)} free of {_gib(total)}"
    if total < LITTLE_SHM:
        return Check(
            "/dev/shm",
            "warn",
            f"{detail}; NCCL, data loader workers and vLLM need more",
            "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory)",
        )
    if free < LITTLE_SHM:
        return Check("/dev/shm", "warn", f"{detail}; it is nearly full", "ls -l /dev/shm")
    return Check("/dev/shm", "ok", detail)


def check_disk(facts: Facts) -> Check:
    """The lab's folder and the temporary folder can be written, and have room."""
    detail = f"{_gib(facts.disk_free_bytes)} free at {facts.lab_folder}"
    if facts.unwritable:
        which = "; ".join(f"{path}: {problem}" for path, problem in facts.unwritable.items())
        return Check(
            "disk",
            "fail",
            f"cannot write: {which}",
            "copy the lab to a folder of yours, or set TMPDIR to one",
        )
    if facts.disk_free_bytes < TOO_LITTLE_DISK:
        return Check("disk", "fail", f"{detail}; notebooks and logs need 1 GiB", "free some space")
    if facts.disk_free_bytes < LITTLE_DISK:
        return Check(
            "disk", "warn", f"{detail}; checkpoints and a GPU stack need 10", "free some space"
        )
    return Check("disk", "ok", detail)


def _gib(size_bytes: int) -> str:
    """Memory for people: MiB below one GiB."""
    if size_bytes < GIB:
        return f"{size_bytes / MIB:.0f} MiB"
    return f"{size_bytes / GIB:.1f} GiB"


MACHINE_CHECKS = (
    check_driver,
    check_gpus,
    check_links,
    check_cpus,
    check_memory,
    check_shm,
    check_disk,
)
