"""Does torch import, and does a gloo process group come up on the interface that ranks will use?

    trial = start_trial({"GLOO_SOCKET_IFNAME": "lo"})       # a process of its own, at once
    trial.result()                                          # Trial(problem='', seconds=1.4, ...)

One process forms a group of one and reduces a tensor. That exercises what fails on odd machines:
importing torch, finding the interface, binding a socket on it. It also asks torch about CUDA, which
must not happen in the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0

PROGRAM = """
import json, sys
def tell(**found):
    print(json.dumps(found), flush=True)
import torch
import torch.distributed as dist
tell(torch=torch.__version__)
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
total = torch.ones(4)
dist.all_reduce(total)
dist.destroy_process_group()
assert total.tolist() == [1.0] * 4
tell(gloo=True)
if torch.version.cuda and sys.argv[1] == "with-gpu":
    available = torch.cuda.is_available()
    tell(cuda=available, nccl=list(torch.cuda.nccl.version()))
"""


@dataclass(frozen=True)
class Trial:
    """What the trial process found out before it ended."""

    torch_version: str | None = None
    """As the imported module says; None when the import failed."""
    gloo_works: bool = False
    cuda_available: bool | None = None
    """Whether torch could start CUDA; None when that was not asked."""
    nccl_version: str | None = None
    problem: str = ""
    """Last line of what it complained of; empty when it ended well."""
    seconds: float = 0.0


@dataclass
class RunningTrial:
    """A trial in progress."""

    process: subprocess.Popen[str]
    started: float

    def result(self) -> Trial:
        """Wait for the end, at most TIMEOUT_S seconds."""
        try:
            stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
            problem = "" if self.process.returncode == 0 else _last_line(stderr)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, _ = self.process.communicate()
            problem = f"did not finish within {TIMEOUT_S:g} s"
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        if self.process.returncode and not problem:
            problem = f"ended with code {self.process.returncode}"
        return _trial(stdout, problem, time.monotonic() - self.started)


def start_trial(env: Mapping[str, str], *, with_gpu: bool) -> RunningTrial:
    """Start the trial process with `env` added to the environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "with-gpu" if with_gpu else "without-gpu"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    return RunningTrial(process, time.monotonic())


def _trial(stdout: str, problem: str, seconds: float) -> Trial:
    found: dict[str, Any] = {}
    for line in stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return Trial(
        torch_version=found.get("torch"),
        gloo_works=bool(found.get("gloo")),
        cuda_available=found.get("cuda"),
        nccl_version=".".join(map(str, found["nccl"])) if "nccl" in found else None,
        problem=problem,
        seconds=seconds,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
