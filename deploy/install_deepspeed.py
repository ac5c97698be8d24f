"""Add DeepSpeed beside the lab's stack, in an environment of its own: what `make deepspeed` runs.

    .venv/bin/python deploy/install_deepspeed.py

    .venv-deepspeed  =  what the Python that runs this has  +  deploy/deepspeed.txt

The other environment's packages are seen through one line in a .pth file, so they exist once and
stay as they are. With a stamp of what is installed it returns at once the second time; an
environment without one was left half built and is built anew. DeepSpeed's own C++ and CUDA
operators are not built: the course needs none, and each would want a compiler.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from install import (
    CONSTRAINTS,
    ROOT,
    STAMP,
    Pip,
    check_packages,
    read_stamp,
    run_alone,
    say,
    succeeds,
)

REQUIREMENTS = ROOT / "deploy" / "deepspeed.txt"
INPUTS = [REQUIREMENTS, CONSTRAINTS, Path(__file__).resolve()]
VENV = ROOT / ".venv-deepspeed"
ALL_THERE = "from importlib.util import find_spec as f; assert f('deepspeed') and f('torch')"


def fingerprint(venv: Path, below: Path) -> str:
    """Changes with the versions wanted, and with the environment whose packages are seen."""
    digest = hashlib.sha256(f"{venv} {below} {sys.version} {read_stamp(below)}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build(venv: Path, below: Path) -> None:
    """Bring `venv` to what is wanted, on top of `below`, the environment of this Python."""
    done = {"fingerprint": fingerprint(venv, below)}
    python = venv / "bin" / "python"
    if read_stamp(venv) == done and succeeds(str(python), "-c", ALL_THERE):
        say(f"{venv.name}: ready")
        return
    started = time.monotonic()
    say(f"{venv.name}: DeepSpeed, beside the packages of {below.name}")
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True
    )
    pip = Pip(python)
    path_of = "import sysconfig; print(sysconfig.get_path('purelib'))"
    seen = Pip(Path(sys.executable)).query(path_of).strip()
    own = Path(pip.query(path_of).strip())
    # addsitedir, not the folder's name alone: .pth files in there are read too.
    (own / "packages_below.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
    # The build asks for a device; told "cpu", it needs no CUDA toolkit, on a GPU machine either.
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    wanted = ("--constraint", str(CONSTRAINTS), "--requirement", str(REQUIREMENTS))
    pip.install("DeepSpeed", "--no-build-isolation", "--no-warn-conflicts", *wanted)
    check_packages(pip, read_stamp(below).get("stack", "cpu"))
    (venv / STAMP).write_text(json.dumps(done) + "\n")
    say(f"{venv.name}: ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(run_alone(lambda: build(VENV, Path(sys.prefix))))
