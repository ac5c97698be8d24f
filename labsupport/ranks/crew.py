"""A set of running ranks: their processes, channels, board and folder. Ends as one.

crew = Crew(launcher, settings)       # returns when every rank has joined the process group
crew.stacks([1]); crew.interrupt(1); crew.unblock(0); crew.rejoin(); crew.close()
"""

from __future__ import annotations

import codecs
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from labsupport.ranks.board import Board
from labsupport.ranks.channel import Channel
from labsupport.ranks.errors import RankError, exit_reason
from labsupport.ranks.frames import read_dumped_stack
from labsupport.ranks.launch import START_TIMEOUT_S, Launcher
from labsupport.ranks.settings import Settings
from labsupport.ranks.spec import RankSpec

STACK_WAIT_S = 1.0


class Crew:
    """The ranks of one pool, from start to end."""

    def __init__(self, launcher: Launcher, settings: Settings) -> None:
        self.settings = settings
        self.closed = False
        self._launcher = launcher
        self._generation = 0
        self._cells: dict[str, str] = {}  # file name of a cell in a rank -> its text
        self._log_read = [0] * settings.world_size
        make_decoder = codecs.getincrementaldecoder("utf-8")  # keeps half a character for later
        self._decoders = [make_decoder("replace") for _ in range(settings.world_size)]
        self._stack_read: dict[int, int] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._context: zmq.Context[Any] = zmq.Context()
        self.channels: list[Channel] = []
        self.pids: list[int] = []
        try:
            self.board = Board(self.folder / "board", rank=None, world_size=settings.world_size)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        specs = [self._spec(rank) for rank in range(self.settings.world_size)]
        self._specs = specs
        self.channels = [Channel(self._context, spec.connection_file) for spec in specs]
        for spec in specs:
            self.pids.append(self._launcher.start(spec))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for rank, channel in enumerate(self.channels):
            if not channel.wait_until_ready(
                deadline_s=deadline_s, still_alive=partial(self._is_alive, rank)
            ):
                codes = self.ended()
                why = exit_reason(codes[rank]) if rank in codes else "it did not answer"
                words = self.read_log(rank).strip()
                raise RankError(
                    f"rank {rank} could not start: {why}", rank=rank, remote_traceback=words
                )
        port_file = self.folder / "port"
        self._ask({0: f"__lab__.host_store({str(port_file)!r})"})
        self._port = int(port_file.read_text())
        self.rejoin()

    def _spec(self, rank: int) -> RankSpec:
        settings = self.settings
        return RankSpec(
            rank=rank,
            world_size=settings.world_size,
            backend=settings.backend,
            device=f"cuda:{rank}" if settings.device == "cuda" else "cpu",
            threads=settings.threads,
            collective_timeout_s=settings.collective_timeout_s,
            folder=str(self.folder),
            cwd=os.getcwd(),
            env=dict(settings.env),
            python_path=[path or os.getcwd() for path in sys.path if isinstance(path, str)],
        )

    def _is_alive(self, rank: int) -> bool:
        return rank not in self.ended()

    def ended(self) -> dict[int, int | None]:
        """Ranks whose process has ended: rank -> exit code."""
        codes = self._launcher.exit_codes(self.pids)
        return {rank: codes[pid] for rank, pid in enumerate(self.pids) if pid in codes}

    def rejoin(self) -> None:
        """Make the process group anew on every rank. Raises RankError where one cannot."""
        self._generation += 1
        code = f"__lab__.join({self._port}, {self._generation})"
        self._ask(dict.fromkeys(range(self.settings.world_size), code))

    def interrupt(self, rank: int) -> None:
        """KeyboardInterrupt in the rank's Python code, as soon as it runs any."""
        self._launcher.signal(self.pids[rank], signal.SIGINT)

    def unblock(self, rank: int) -> None:
        """Make a collective that waits in C++ code fail, by cutting its connections."""
        self._launcher.tell(self.pids[rank], "unblock")

    def kill(self, rank: int) -> None:
        """End the rank and what it has started."""
        self._launcher.signal(self.pids[rank], signal.SIGKILL)

    def remember_cell(self, code: str) -> None:
        """So that a stack can show the lines of a cell."""
        from ipykernel.compiler import get_file_name

        self._cells[Path(get_file_name(code)).name] = code

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where each of these ranks stands now, as text, innermost call last."""
        sizes = {rank: self._stack_file(rank).stat().st_size for rank in ranks}
        self._stack_read |= sizes
        for rank in sizes:
            self._launcher.signal(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACK_WAIT_S
        waiting = set(sizes)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            waiting = {r for r in waiting if self._stack_file(r).stat().st_size == sizes[r]}
        if sizes:
            time.sleep(0.02)  # the dump is a few small writes
        return {rank: self.dumped_stack(rank) for rank in sizes}

    def dumped_stack(self, rank: int) -> str:
        """What faulthandler has written for this rank since the last call; empty if nothing."""
        content = self._stack_file(rank).read_bytes()
        text = content[self._stack_read.get(rank, 0) :].decode(errors="replace")
        self._stack_read[rank] = len(content)
        return (
            read_dumped_stack(text, lambda name: self._cells.get(Path(name).name)) if text else ""
        )

    def read_log(self, rank: int) -> str:
        """What the rank has written past Python's streams since the last call."""
        try:
            with self._specs[rank].log_file.open("rb") as log:
                log.seek(self._log_read[rank])
                content = log.read()
        except FileNotFoundError:  # it has not got that far
            return ""
        self._log_read[rank] += len(content)
        return self._decoders[rank].decode(content)

    def close(self) -> None:
        """End every rank and what it has started, and remove the folder."""
        if self.closed:
            return
        self.closed = True
        for pid in self.pids:
            self._launcher.signal(pid, signal.SIGKILL)
        try:
            deadline = time.monotonic() + 5.0
            while len(self.ended()) < len(self.pids) and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:
            for channel in self.channels:
                channel.close()
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stack_file(self, rank: int) -> Path:
        return self._specs[rank].stack_file

    def _ask(self, codes: Mapping[int, str]) -> None:
        """Run the pool's own code on ranks that are idle; RankError if one fails."""
        ids = {rank: self.channels[rank].execute(code, silent=True) for rank, code in codes.items()}
        deadline = time.monotonic() + max(30.0, self.settings.collective_timeout_s)
        while ids:
            for rank, message_id in list(ids.items()):
                self.channels[rank].shell.poll(50)
                for reply in self.channels[rank].replies():
                    if reply["parent_header"].get("msg_id") != message_id:
                        continue
                    del ids[rank]
                    if reply["content"]["status"] != "ok":
                        told = reply["content"].get("evalue", "")
                        raise RankError(f"rank {rank} could not join the others: {told}", rank=rank)
            dead = set(ids) & set(self.ended())
            if dead or time.monotonic() > deadline:
                absent = sorted(dead or ids)
                raise RankError(f"ranks {absent} did not join the others", rank=absent[0])
