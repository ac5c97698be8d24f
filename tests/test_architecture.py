"""Who may import whom in labsupport, how large a file may be, and what an import may load.

The table is the design's: five floors, no circles. Imports are read from the source, so one that
hides in a function counts; one under `if TYPE_CHECKING:` does not, since it never runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "labsupport"
MAX_LINES = 299

FLOOR_1 = {"config", "hardware", "results", "published"}
FLOOR_2 = {"plan", "devices", "model", "data", "plots"}
FLOOR_3 = {"parallel", "checkpoint", "measure", "ranks", "jobs", "doctor", "serve", "widgets"}
MAY_IMPORT: dict[str, set[str]] = {
    **{room: set() for room in FLOOR_1},
    "plan": {"config", "hardware", "published"},
    "devices": {"hardware"},
    "model": {"config"},
    "data": {"config"},
    "plots": {"results", "plan"},
    "parallel": {"config", "devices", "model", "plan.pipeline"},
    "checkpoint": {"config", "model"},
    "measure": {"devices", "hardware", "results.aligned"},
    "ranks": {"devices"},
    "jobs": {"devices"},
    "doctor": {"devices", "hardware"},
    "serve": {"config", "model", "plan.serving"},
    "widgets": {"plan", "plots", "results", "config"},
    "train": (FLOOR_1 | FLOOR_2 | FLOOR_3) - {"widgets", "serve"},
    "clinic": {"data", "model", "measure", "parallel"},
}
MAY_IMPORT["checks"] = (FLOOR_1 | FLOOR_2 | FLOOR_3 | {"train", "clinic"}) - {"widgets"}
MAY_IMPORT["__main__"] = set(MAY_IMPORT)
MAY_IMPORT["__init__"] = set(MAY_IMPORT)  # the front door: it looks names up when first used
# A file beside its room, and the names that `from labsupport import …` takes from a room.
ROOM_OF_FILE = {"corpus": "data", "sampler": "data"}
ROOM_OF_NAME = dict.fromkeys(("Ranks", "RankError", "RankDied", "RankTimeout"), "ranks")

# Heavy or optional libraries, and the only files that may import them.
OWN_MODULES = {
    "vllm": "serve/vllm",
    "deepspeed": "parallel/deepspeed",
    "ipywidgets": "widgets/",
}


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runs(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of the tree that can run: all but the body of `if TYPE_CHECKING:`."""
    yield node
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = list(node.orelse)
    for child in children:
        yield from runs(child)


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, relative ones made absolute; `from a import b` is a.b."""
    here = module_name(path, package).split(".")
    if path.name != "__init__.py":
        here = here[:-1]
    for node in runs(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def room(path: Path, package: Path) -> str:
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return ROOM_OF_FILE.get(first, first)


def edges(package: Path) -> Iterator[tuple[str, str, str]]:
    """(file:line, importing room, what it imports, from the room on) for imports inside."""
    for path in sorted(package.rglob("*.py")):
        for line, name in imports(path, package):
            head, _, inside = name.partition(".")
            if head != package.name or not inside:
                continue
            first, dot, rest = inside.partition(".")
            target = ROOM_OF_NAME.get(first) or ROOM_OF_FILE.get(first, first) + dot + rest
            if target.partition(".")[0] in MAY_IMPORT:
                yield f"{path.relative_to(package)}:{line}", room(path, package), target


def forbidden(package: Path) -> list[str]:
    found = []
    for where, source, target in edges(package):
        if target.partition(".")[0] == source:
            continue
        allowed = MAY_IMPORT.get(source, set())
        if not any(f"{target}.".startswith(f"{name}.") for name in allowed):
            found.append(f"{where}: {source} may not import {target}")
    return found


def misplaced(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        for line, name in imports(path, package):
            home = OWN_MODULES.get(name.partition(".")[0])
            relative = path.relative_to(package).as_posix()
            if home and not relative.startswith(home):
                found.append(f"{relative}:{line}: {name} belongs in {home}")
    return found


def too_long(package: Path) -> list[str]:
    counted = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    found = [(path.relative_to(package), n) for path, n in counted.items() if n > MAX_LINES]
    return [f"{path}: {n} lines" for path, n in sorted(found)]


def python(code: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, text=True, capture_output=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_belongs_to_a_room() -> None:
    files = PACKAGE.rglob("*.py")
    assert {room(path, PACKAGE) for path in files} <= set(MAY_IMPORT)


def test_rooms_import_only_what_the_table_allows() -> None:
    assert forbidden(PACKAGE) == []


def test_rooms_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for _, source, target in edges(PACKAGE):
        if source not in {"__init__", target.partition(".")[0]}:
            graph.setdefault(source, set()).add(target.partition(".")[0])
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_optional_libraries_stay_in_their_own_modules() -> None:
    assert misplaced(PACKAGE) == []


def test_every_file_is_short() -> None:
    assert too_long(PACKAGE) == []


def test_import_of_labsupport_is_fast_and_loads_neither_torch_nor_jupyter() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import labsupport;"
        "print(time.perf_counter() - start, *sys.modules)"
    )
    runs_of_3 = [python(code).split() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs_of_3) < 0.2
    heavy = {"torch", "IPython", "ipykernel", "jupyter_client", "zmq", "numpy", "matplotlib"}
    assert heavy.isdisjoint(runs_of_3[0][1:])


def test_plan_needs_only_the_standard_library() -> None:
    # -S leaves site-packages out and -I the user's: a third-party import would raise.
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r});"
        "import importlib, pkgutil, labsupport.plan as plan;"
        "names = [m.name for m in pkgutil.walk_packages(plan.__path__, 'labsupport.plan.')];"
        "[importlib.import_module(name) for name in names]; print('torch' in sys.modules)"
    )
    assert python(code, "-I", "-S").strip() == "False"


# ---- the checks above can fail ----------------------------------------------------------------


@pytest.fixture
def small_package(tmp_path: Path) -> Path:
    package = tmp_path / "labsupport"
    for folder in ("serve", "widgets"):
        (package / folder).mkdir(parents=True)
    return package


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("model.py", "def f():\n    from labsupport import train", "model may not import train"),
        ("config.py", "from .model import Llama", "config may not import model.Llama"),
        ("serve/load.py", "import labsupport.ranks", "serve may not import ranks"),
        ("serve/load.py", "from labsupport import Ranks", "serve may not import ranks"),
        ("serve/load.py", "from ..plan import memory", "serve may not import plan.memory"),
        ("data.py", "import_module('labsupport.results')", "data may not import results"),
    ],
)
def test_a_forbidden_import_is_found(
    small_package: Path, file: str, source: str, message: str
) -> None:
    (small_package / file).write_text(source)
    (found,) = forbidden(small_package)
    assert found.endswith(message)


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from labsupport import ranks",
        "from labsupport.plan.serving import kv_cache_bytes",
        "from labsupport import config",
        "from . import metrics",
    ],
)
def test_an_allowed_import_is_not(small_package: Path, source: str) -> None:
    (small_package / "serve/load.py").write_text(source)
    assert forbidden(small_package) == []


def test_a_misplaced_library_and_a_long_file_are_found(small_package: Path) -> None:
    (small_package / "plots.py").write_text("def f():\n    import ipywidgets as w\n" + "\n" * 300)
    (small_package / "widgets/ring.py").write_text("import ipywidgets")
    (small_package / "serve/vllm.py").write_text("from vllm import LLM")
    assert misplaced(small_package) == ["plots.py:2: ipywidgets belongs in widgets/"]
    assert too_long(small_package) == ["plots.py: 302 lines"]
