"""Can this job be started at all? Asked before anything is.

check_job("labsupport.train", nproc_per_node=2, nnodes=1, rdzv_endpoint=None, deadline_s=None)
check_job("no_such_module", 2, 1, None, None)        # ValueError: ... works
steps_in(["--steps", 20])                            # 20, for the progress bar
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path


def check_job(
    program: str,
    nproc_per_node: int,
    nnodes: int,
    rdzv_endpoint: str | None,
    deadline_s: float | None,
) -> None:
    """Raise ValueError that names the value, the rule, and a value that works."""
    for name, value in (("nproc_per_node", nproc_per_node), ("nnodes", nnodes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1; 2 works")
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"{deadline_s=} must be above 0 seconds; 60 or None (no limit) works")
    if nnodes > 1 and rdzv_endpoint is None:
        raise ValueError(
            f"{nnodes=} needs rdzv_endpoint, the place where the nodes meet; "
            "rdzv_endpoint='127.0.0.1:29400' works"
        )
    if rdzv_endpoint is not None:
        _check_endpoint(rdzv_endpoint)
    _check_program(program)


def _check_endpoint(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"rdzv_endpoint={endpoint!r} must be host:port with a port from 0 to 65535; "
            "'127.0.0.1:0' works on one machine"
        )


def _check_program(program: str) -> None:
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise ValueError(f"{program=} is not a file; the path of an existing script works")
        return
    parts = program.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"{program=} must be a module name or the path of a .py file; 'labsupport.train' works"
        )
    here = Path(*parts)  # the ranks look in the current folder too
    if not (here.is_dir() or here.with_suffix(".py").is_file() or _is_importable(program)):
        raise ValueError(
            f"{program=} is no module that this Python finds; 'labsupport.train' works"
        )


def _is_importable(module: str) -> bool:
    """Whether the module is found. Packages on the way to it are imported, itself not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def steps_in(args: Sequence[object]) -> int | None:
    """The number after `--steps` among a program's arguments, for the length of the bar."""
    texts = [str(arg) for arg in args]
    for text, following in zip(texts, [*texts[1:], ""], strict=False):
        name, equals, value = text.partition("=")
        number = value if equals else following
        if name == "--steps" and number.isdecimal():
            return int(number)
    return None
