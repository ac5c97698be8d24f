"""Which device, backend and how many threads should N ranks use on this machine?

    place = choose_device(world_size=2)        # Placement(device='cpu', backend='gloo', reason=...)
    threads_per_rank(world_size=2)             # ranks x threads <= allowed_cpus()
    print(describe())                          # 2 CPU cores, no GPU

The only module that asks whether CUDA exists. It asks `nvidia-smi`, a separate process, and reads
torch's version file: nothing here imports torch or starts CUDA in the caller, but `synchronize` and
`compute_capability`, which are about a device in use.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

NVIDIA_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one pool or job run, and over which backend they talk."""

    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    reason: str
    """One phrase for people, e.g. "no GPU is visible here"."""


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi -L`."""

    index: int
    name: str
    uuid: str


@dataclass(frozen=True)
class SmiResult:
    """What one call of nvidia-smi gave. `problem` is empty exactly when it succeeded."""

    found: bool
    stdout: str
    problem: str


def choose_device(world_size: int, device: str = "auto") -> Placement:
    """One GPU a rank with nccl where there are enough, else every rank on the CPU with gloo.

    Raises ValueError for a world size below 1, an unknown device, or `device="cuda"` with fewer
    usable GPUs than ranks.
    """
    check_world_size(world_size)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{device=} is not a device; use 'auto', 'cpu' or 'cuda'")
    if device == "cpu":
        return Placement("cpu", "gloo", "asked for")
    count = gpu_count()
    obstacle = _obstacle(world_size, count)
    if not obstacle:
        return Placement("cuda", "nccl", f"{_count(count, 'GPU')} for {_count(world_size, 'rank')}")
    if device == "cuda":
        most = count if cuda_build() else 0
        works = f"world_size={most} or device='cpu'" if most else "device='cpu'"
        raise ValueError(f"{device=} needs a GPU a rank, but {obstacle}; {works} works")
    return Placement("cpu", "gloo", obstacle)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless `world_size` is a whole number of at least 1."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"{world_size=} must be a whole number of at least 1; 2 works")


def threads_per_rank(
    world_size: int, requested: int | None = None, *, env: Mapping[str, str] | None = None
) -> int:
    """Threads for each of `world_size` ranks: the request, else OMP_NUM_THREADS, else a fair share.

    The share keeps ranks x threads within `allowed_cpus()` (at least 1). `env` stands for
    os.environ. Raises ValueError for a request below 1.
    """
    check_world_size(world_size)
    if requested is not None:
        if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
            raise ValueError(f"threads per rank {requested!r} must be a whole number >= 1; 1 works")
        return requested
    users = (os.environ if env is None else env).get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if users.isdecimal() and int(users) > 0:
        return int(users)
    return max(1, allowed_cpus() // world_size)


def allowed_cpus() -> int:
    """Whole CPUs that this process may use: the least of affinity mask and cgroup quota, >= 1."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def cgroup_cpu_quota(
    *, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """CPUs that cgroup v1 or v2 grants (the least along the path to the root); None: no limit."""
    quotas = [
        quota
        for folder in cgroup_folders("cpu", proc=proc, root=root)
        if (quota := _quota_of(folder)) is not None
    ]
    return min(quotas, default=None)


def cgroup_folders(
    controller: str, *, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[Path]:
    """Folders of this process's cgroup for one controller, from its own up to the root."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup v2
            tops = [root, root / "unified"]
        elif controller in controllers.split(","):  # v1, a mount point per controller
            tops = [root / controllers, root / controller]
        else:
            continue
        for top in tops:
            own = top / path.lstrip("/")
            folders += [own, *(p for p in own.parents if p == top or top in p.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _quota_of(folder: Path) -> float | None:
    """CPUs granted by one cgroup folder, read from cpu.max (v2) or cpu.cfs_* (v1)."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def gpu_count() -> int:
    """GPUs that CUDA programs started from here can see; 0 without (or with a broken) driver."""
    return len(visible_gpus())


def visible_gpus() -> tuple[Gpu, ...]:
    """GPUs listed by `nvidia-smi -L` that CUDA_VISIBLE_DEVICES leaves visible, in its order."""
    gpus = tuple(
        Gpu(int(match[1]), match[2], match[3])
        for match in re.finditer(
            r"^GPU (\d+): (.+?) \(UUID: ([^)]+)\)", nvidia_smi("-L").stdout, re.MULTILINE
        )
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if chosen is None else _select(gpus, chosen)


def _select(gpus: tuple[Gpu, ...], chosen: str) -> tuple[Gpu, ...]:
    """CUDA's own rule: entries count up to the first that names no GPU, and never twice."""
    selected: list[Gpu] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal():
            found = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            found = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if entry.startswith("MIG-") and gpus:
            return gpus[:1]  # CUDA shows one slice of one GPU, whatever follows
        if len(found) != 1:
            break
        if found[0] in selected:
            return ()  # CUDA refuses a device named twice
        selected += found
    return tuple(selected)


def nvidia_smi(*args: str, timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> SmiResult:
    """Run nvidia-smi from PATH with `args`; asked once per process, program and arguments."""
    return _ask_nvidia_smi(shutil.which("nvidia-smi"), args, timeout_s)


@lru_cache(maxsize=32)
def _ask_nvidia_smi(program: str | None, args: tuple[str, ...], timeout_s: float) -> SmiResult:
    if program is None:
        return SmiResult(found=False, stdout="", problem="no nvidia-smi on PATH")
    try:
        done = subprocess.run(
            [program, *args], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return SmiResult(True, "", f"nvidia-smi did not answer within {timeout_s:g} s")
    except OSError as error:
        return SmiResult(True, "", f"nvidia-smi could not be started: {error}")
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        return SmiResult(True, "", f"nvidia-smi ended with code {done.returncode}: {said}")
    return SmiResult(True, done.stdout, "")


@lru_cache(maxsize=1)
def cuda_build() -> str | None:
    """CUDA version that the installed torch was built for, or None; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    text = version_file.read_text() if version_file.exists() else ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def synchronize(device: Any) -> None:
    """Wait until `device` ("cpu", "cuda:1", torch.device) has done what it was given."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def compute_capability(device: Any) -> tuple[int, int] | None:
    """(9, 0) of an H100 that this process uses as `device`; None where `device` is no GPU here."""
    if not str(device).startswith("cuda") or not gpu_count() or cuda_build() is None:
        return None
    import torch

    return torch.cuda.get_device_capability(device)


def loopback_interface() -> str:
    """Name of the network interface that holds 127.0.0.1: "lo" on Linux, "lo0" on macOS.

    Raises RuntimeError where none does.
    """
    import psutil

    addresses = psutil.net_if_addrs()
    for name, held in addresses.items():
        if any(address.address == "127.0.0.1" for address in held):
            return name
    raise RuntimeError(
        f"no network interface holds 127.0.0.1 (found {sorted(addresses)}); `ip link set lo up` "
        "brings the loopback interface up"
    )


def describe() -> str:
    """This machine in one phrase: "2 CPU cores, no GPU", "16 CPU cores, 2 GPUs (NVIDIA H200)"."""
    gpus = visible_gpus()
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    card = f"{_count(len(gpus), 'GPU')} ({names})" if gpus else "no GPU"
    return f"{_count(allowed_cpus(), 'CPU core')}, {card}"


def _obstacle(world_size: int, count: int) -> str:
    """Why `world_size` ranks cannot have a GPU each; empty when they can."""
    if count == 0:
        return "no GPU is visible here"
    if count < world_size:
        return f"{_count(count, 'GPU')} for {_count(world_size, 'rank')}"
    if cuda_build() is None:
        return f"{_count(count, 'GPU')} but the installed torch is a build without CUDA"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
