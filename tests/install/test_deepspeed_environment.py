"""`make deepspeed` adds DeepSpeed beside the stack: pinned, quick the second time, no more.

What it built here is looked at; a build from nothing is one of the clean-clone checks, when asked.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labsupport.parallel import deepspeed

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "deploy" / "install_deepspeed.py"
needs_deepspeed = pytest.mark.skipif(not deepspeed.is_installed(), reason=deepspeed.MISSING)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(INSTALL.parent))  # it imports install.py beside it
    spec = importlib.util.spec_from_file_location("install_deepspeed", INSTALL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in found}


def added() -> dict[str, str]:
    """What the environment holds itself."""
    found = metadata.distributions(path=[str(deepspeed.packages())])
    return {canonicalize_name(one.metadata["Name"]): one.version for one in found}


@needs_deepspeed
def test_it_holds_what_is_pinned_and_the_rest_comes_from_below() -> None:
    asked, known = pins("deploy/deepspeed.txt"), pins("constraints.txt")
    assert asked.items() <= added().items()
    assert added().items() <= {**known, **asked}.items()  # what a stack without vLLM lacks
    (info,) = metadata.distributions(path=[str(deepspeed.packages())], name="deepspeed")
    wanted = [Requirement(line) for line in info.requires or []]
    names = {canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate()}
    assert names <= {*known, *asked}


@needs_deepspeed
def test_the_other_environment_is_seen_and_has_no_deepspeed() -> None:
    code = "import deepspeed.git_version_info as g, torch, sys; print(g.version, torch.__file__)"
    python = ROOT / ".venv-deepspeed/bin/python"
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, env=env, check=True)
    version, torch = done.stdout.split()[-2:]
    assert version == pins("deploy/deepspeed.txt")["deepspeed"]
    assert Path(torch).is_relative_to(sys.prefix)
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("deepspeed")


@needs_deepspeed
def test_the_second_time_it_does_nothing(install: ModuleType) -> None:
    stamp = install.VENV / install.STAMP
    before = stamp.stat().st_mtime_ns
    start = time.monotonic()
    done = subprocess.run([sys.executable, INSTALL], text=True, capture_output=True, check=True)
    assert done.stdout == ".venv-deepspeed: ready\n"
    assert time.monotonic() - start < 10
    assert stamp.stat().st_mtime_ns == before


def test_new_versions_and_a_new_stack_below_call_for_a_new_environment(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv, below = tmp_path / "venv", tmp_path / "below"
    below.mkdir()
    before = install.fingerprint(venv, below)
    assert install.fingerprint(venv, below) == before
    (below / install.STAMP).write_text('{"stack": "gpu"}')
    assert install.fingerprint(venv, below) != before
    (below / install.STAMP).unlink()
    newer = tmp_path / "deepspeed.txt"
    newer.write_text(install.REQUIREMENTS.read_text() + "einops==0.9\n")
    monkeypatch.setattr(install, "INPUTS", [newer, *install.INPUTS[1:]])
    assert install.fingerprint(venv, below) != before


def test_a_build_asks_for_pinned_versions_and_no_operators(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(install.Pip, "install", lambda self, what, *args: asked.append(args))
    monkeypatch.setattr(install, "check_packages", lambda pip, stack: None)
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    venv = tmp_path / ".venv-deepspeed"
    install.build(venv, Path(sys.prefix))
    (args,) = asked
    assert {"--constraint", str(install.CONSTRAINTS), str(install.REQUIREMENTS)} <= set(args)
    assert os.environ["DS_BUILD_OPS"] == "0"
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    (pth,) = venv.glob("lib/python*/site-packages/*.pth")
    assert "addsitedir" in pth.read_text()
    assert (venv / install.STAMP).exists()
