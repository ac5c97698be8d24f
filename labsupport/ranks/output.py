"""What ranks print, as whole lines in the cell, each with its rank in front.

    [0] step 1, loss 7.62
    [1] step 1, loss 7.62

Lines that arrive together are shown in rank order: the first one to arrive waits a moment for the
others. A progress bar redraws its own line; a figure follows a line that names its rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOGETHER_S = 0.15
EARLIER = "(from an earlier cell) "


@dataclass(frozen=True)
class _Item:
    rank: int
    stream: str
    """`stdout`, `stderr` or `display`."""
    text: str = ""
    redraws: bool = False
    """A line that takes the place of the progress bar above it."""
    message: Mapping[str, Any] | None = None


class Output:
    """Gathers what ranks send during one cell and shows it."""

    def __init__(self) -> None:
        self._waiting: list[_Item] = []
        self._since: float | None = None
        self._unfinished: dict[tuple[int, str], str] = {}
        self._open_bar: str | None = None  # the stream on which a bar stands without line end

    def add_text(self, rank: int, stream: str, text: str, *, note: str = "") -> None:
        """Take in a piece of a stream; whatever is not a whole line yet waits for the rest."""
        *lines, rest = (self._unfinished.pop((rank, stream), "") + text).split("\n")
        for line in lines:
            # Within a line, a carriage return starts over: what counts is what stands last.
            bar, _, last = line.rstrip("\r").rpartition("\r")
            self._add(_Item(rank, stream, note + (last or bar), redraws="\r" in line))
        if "\r" in rest.rstrip("\r"):
            rest = "\r" + rest.rstrip("\r").rpartition("\r")[2]
            self._draw_bar(rank, stream, rest[1:])
        if rest:
            self._unfinished[rank, stream] = rest

    def add_display(self, rank: int, message: Mapping[str, Any], *, note: str = "") -> None:
        """Take in a result or a figure, in the form of Jupyter's messages."""
        data = message["content"]["data"]
        if set(data) == {"text/plain"}:
            self.finish_lines(rank)
            for line in data["text/plain"].split("\n"):
                self._add(_Item(rank, "stdout", note + line))
        else:
            self._add(_Item(rank, "display", note, message=message))

    def finish_lines(self, rank: int | None = None) -> None:
        """Show also what lacks its line end: the cell is over, or something else follows."""
        for (owner, stream), text in list(self._unfinished.items()):
            if rank is None or owner == rank:
                del self._unfinished[owner, stream]
                self._add(_Item(owner, stream, text.lstrip("\r"), redraws=text.startswith("\r")))

    def wait_s(self, at_most: float) -> float:
        """How long to wait for more before something has to be shown."""
        if self._since is None:
            return at_most
        return max(0.0, min(at_most, self._since + TOGETHER_S - time.monotonic()))

    def show(self, *, now: bool = False) -> None:
        """Show what has waited long enough; with `now` everything that is whole."""
        if self._since is None or (not now and time.monotonic() < self._since + TOGETHER_S):
            return
        items, self._waiting, self._since = self._waiting, [], None
        for item in sorted(items, key=lambda item: item.rank):  # stable: a rank keeps its order
            self._show(item)
        sys.stdout.flush()
        sys.stderr.flush()

    def _add(self, item: _Item) -> None:
        self._waiting.append(item)
        if self._since is None:
            self._since = time.monotonic()

    def _draw_bar(self, rank: int, stream: str, text: str) -> None:
        target = _stream(stream)
        target.write(f"\r[{rank}] {text}")
        target.flush()
        self._open_bar = stream

    def _show(self, item: _Item) -> None:
        if self._open_bar is not None and not item.redraws:
            _stream(self._open_bar).write("\n")
        start = "\r" if item.redraws and self._open_bar is not None else ""
        self._open_bar = None
        target = _stream("stdout" if item.stream == "display" else item.stream)
        target.write(f"{start}[{item.rank}] {item.text}".rstrip(" ") + "\n")
        if item.message is not None:
            target.flush()
            _publish(item.message)


def _stream(name: str) -> Any:
    return sys.stderr if name == "stderr" else sys.stdout


def _publish(message: Mapping[str, Any]) -> None:
    """Show a rich result here; outside Jupyter its text has to do."""
    from IPython.core.interactiveshell import InteractiveShell

    content = message["content"]
    if InteractiveShell.initialized():
        InteractiveShell.instance().display_pub.publish(
            data=content["data"],
            metadata=content.get("metadata", {}),
            transient=content.get("transient", {}),
            update=message["header"]["msg_type"] == "update_display_data",
        )
    else:
        sys.stdout.write(content["data"].get("text/plain", "") + "\n")
