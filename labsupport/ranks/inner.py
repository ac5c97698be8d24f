"""What the notebook asks a rank to do: join the group, call a function, leave its error readable.

    __lab__.join(address, port, generation)       # sent by the pool as ordinary cells
    __lab__.call(payload_file, result_file)

One object a rank, in the kernel's namespace as `__lab__`.
"""

from __future__ import annotations

import datetime
import linecache
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from labsupport.ranks import transport
from labsupport.ranks.board import Board
from labsupport.ranks.frames import is_plumbing, own_part, readable
from labsupport.ranks.watch import watch

LOOPBACK = "127.0.0.1"
OWN_ERRORS = "labsupport.ranks.errors."
GLOO_NOISE = re.compile(r"\[/\S+/gloo/\S+\.cc:\d+\] | This is typically caused by .*")
CELL_FILE = re.compile(r"[^\s\"]*ipykernel_\d+/\d+\.py")


class Inner:
    """The rank's own hands."""

    def __init__(self, rank: int, world_size: int, backend: str, device: str, board: Board) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.board = board
        self.collective_timeout_s = 30.0
        self.port = 0
        """Of the store, whatever a cell does to MASTER_PORT."""
        self._store: TCPStore | None = None
        self._generation = 0
        self._used_prefixes: set[str] = set()
        self._shell: Any = None
        self._init_process_group: Callable[..., None] = dist.init_process_group

    def attach(self, shell: Any) -> None:
        """Report errors of cells in plain text, and make a second initialisation harmless."""
        self._shell = shell
        shell.set_custom_exc((BaseException,), self._on_error)
        dist.init_process_group = dist.distributed_c10d.init_process_group = self._initialise
        watch(self.board)

    def host_store(self, port_file: str) -> None:
        """On rank 0: serve the store on a port that the system chooses, and keep it."""
        self._store = self._tcp_store(port=0, is_master=True)
        Path(port_file).write_text(str(self._store.port))

    def join(self, port: int, generation: int) -> None:
        """Be part of the process group number `generation`, leaving the one before it."""
        self.port = port
        if self._store is None:
            self._store = self._tcp_store(port=port, is_master=False)
        os.environ.update(
            MASTER_ADDR=LOOPBACK,
            MASTER_PORT=str(port),
            WORLD_SIZE=str(self.world_size),
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            LOCAL_WORLD_SIZE=str(self.world_size),
        )
        if dist.is_initialized():
            dist.destroy_process_group()
        self.board.reset_row()
        self._generation = generation
        self._initialise()

    def call(self, payload_file: str, result_file: str) -> None:
        """Run the pickled function; its result goes to a file, its error to the cell."""
        function, args, kwargs, sources = transport.load(Path(payload_file).read_bytes())
        for filename, source in sources.items():
            linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        for sent in (function, *args, *kwargs.values()):
            if isinstance(sent, FunctionType) and sent.__module__ == "__main__":
                # Its own names win; `rank`, `dist` and what earlier cells defined fill the gaps.
                for name, value in self._shell.user_ns.items():
                    if not name.startswith("_"):
                        sent.__globals__.setdefault(name, value)
        result = function(*args, **kwargs)
        Path(result_file).write_bytes(transport.dump_result(result))

    def _tcp_store(self, *, port: int, is_master: bool) -> TCPStore:
        return TCPStore(
            LOOPBACK,
            port,
            self.world_size,
            is_master=is_master,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=max(30.0, self.collective_timeout_s)),
        )

    def _initialise(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for `init_process_group`: nothing to do while there is a group.

        Called again after `destroy_process_group`, it makes the group anew over the same store.
        """
        if dist.is_initialized():
            return
        own_way = kwargs.get("store") or kwargs.get("init_method") or "env://"
        if own_way != "env://":  # the learner brings a rendezvous of their own
            self._init_process_group(*args, **kwargs)
            return
        generation, count = self._generation, 0
        while f"{generation}.{count}" in self._used_prefixes:
            count += 1
        prefix = f"{generation}.{count}"
        self._used_prefixes.add(prefix)
        options: dict[str, Any] = {
            "backend": self.backend,
            "timeout": datetime.timedelta(seconds=self.collective_timeout_s),
        }
        if self.device.startswith("cuda"):
            options["device_id"] = torch.device(self.device)
        for name in ("backend", "timeout"):
            if kwargs.get(name) is not None:
                options[name] = kwargs[name]
        if args and args[0] is not None:
            options["backend"] = args[0]
        assert self._store is not None
        self._init_process_group(
            store=PrefixStore(prefix, self._store),
            rank=self.rank,
            world_size=self.world_size,
            **options,
        )

    def _on_error(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        tb: TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        lines = format_error(error, tb)
        shell._showtraceback(kind, error, lines)
        return lines


def format_error(error: BaseException, tb: TracebackType | None) -> list[str]:
    """The traceback as lines, without the frames of Jupyter and of this package."""
    innermost_first = list(reversed(traceback.extract_tb(tb)))
    frames = own_part(innermost_first, lambda frame: (frame.filename, frame.name))
    lines = [
        line
        for frame in reversed(frames)
        if not is_plumbing(frame.filename)
        for line in readable(frame)
    ]
    if error.__cause__ is not None:
        lines = [
            *format_error(error.__cause__, error.__cause__.__traceback__),
            "which caused:",
            *lines,
        ]
    last = "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    last = [GLOO_NOISE.sub("", CELL_FILE.sub("cell", line)) for line in last]
    return lines + [line.removeprefix(OWN_ERRORS) for line in last]
