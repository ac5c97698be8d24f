"""Stack frames as a learner wants to read them: own code with its lines, plumbing left out.

cell, line 2, in step
  dist.all_reduce(x)
torch/distributed/distributed_c10d.py, line 3024, in all_reduce
  work.wait()
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import TypeVar

Frame = TypeVar("Frame")
PLUMBING = (
    "/labsupport/ranks/",
    "/IPython/",
    "/ipykernel/",
    "/tornado/",
    "/asyncio/",
    "/traitlets/",
    "/torch/distributed/c10d_logger.py",
    "/torch/_compile.py",
    "/torch/_dynamo/",
    "/contextlib.py",
)
DUMPED_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def is_plumbing(filename: str) -> bool:
    return filename.startswith("<frozen ") or any(part in filename for part in PLUMBING)


def is_cell(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith("<ipython-input")


def readable(frame: FrameSummary) -> list[str]:
    """One frame as one or two lines."""
    where = "cell" if is_cell(frame.filename) else _short(frame.filename)
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    lines = [f"  {where}, line {frame.lineno}{inside}"]
    if frame.line:
        lines.append(f"    {frame.line.strip()}")
    return lines


def own_part(frames: list[Frame], place: Callable[[Frame], tuple[str, str]]) -> list[Frame]:
    """Of frames with the innermost first, those inside the function that the rank was sent."""
    for number, frame in enumerate(frames):
        filename, name = place(frame)
        if name == "call" and filename.endswith("/labsupport/ranks/inner.py"):
            return frames[:number]
    return frames


def read_dumped_stack(text: str, source_of: Callable[[str], str | None]) -> str:
    """What faulthandler wrote (innermost call first), as text with the innermost call last.

    `source_of(filename)` gives the text of a cell that this process does not have as a file.
    """
    lines: list[str] = []
    dumped = [m for m in map(DUMPED_FRAME.match, text.splitlines()) if m]
    for match in reversed(own_part(dumped, lambda m: (m["file"], m["name"]))):
        filename, number = match["file"], int(match["line"])
        if is_plumbing(filename) or filename.endswith(("/runpy.py", "<string>")):
            continue
        line = linecache.getline(filename, number)
        if not line and (source := source_of(filename)) is not None:
            rows = source.splitlines()
            line = rows[number - 1] if number <= len(rows) else ""
        frame = FrameSummary(filename, number, match["name"], line=line.strip(), lookup_line=False)
        lines += readable(frame)
    return "\n".join(lines) if lines else "  (between two cells)"


def _short(filename: str) -> str:
    path = Path(filename)
    major, minor = sys.version_info[:2]
    for marker in ("site-packages", "dist-packages", f"python{major}.{minor}"):
        if marker in path.parts:
            return "/".join(path.parts[path.parts.index(marker) + 1 :])
    checkout = Path(__file__).parents[2]
    return str(path.relative_to(checkout)) if path.is_relative_to(checkout) else filename
