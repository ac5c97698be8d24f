"""`Ranks`: the pool of ranks that a notebook works with."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from labsupport.ranks import launch, transport
from labsupport.ranks.cell import Cell
from labsupport.ranks.crew import Crew
from labsupport.ranks.diagnose import deadline_passed, explain
from labsupport.ranks.errors import Interrupted, RankError
from labsupport.ranks.output import Output
from labsupport.ranks.settings import make_settings

RESTARTED = "[the ranks were started anew: what earlier cells defined on them is gone]"
ENDED_NOTE = "The ranks have ended. The next call starts new ones, with empty memory."
REJOINED_NOTE = (
    "The ranks go on with their variables, in a new process group. "
    "Subgroups and models wrapped in DDP or FSDP have to be made again."
)


class _Held:
    """What has to be released when a pool is closed or forgotten."""

    def __init__(self, launcher: launch.Launcher, owns_launcher: bool) -> None:
        self.launcher = launcher
        self.owns_launcher = owns_launcher
        self.crew: Crew | None = None

    def release(self) -> None:
        try:
            if self.crew is not None:
                self.crew.close()
        finally:
            if self.owns_launcher:
                self.launcher.close()


class Ranks:
    """`world_size` processes that keep their state between calls.

    device: "auto" takes one GPU a rank with nccl where there are enough, else the CPU with gloo.
    collective_timeout_s: how long a collective may wait for a rank that does not come.
    threads_per_rank: by default as many as keep ranks × threads within the allowed CPUs.
    env: further environment variables for the ranks.

    Raises ValueError for a wrong value, before anything is started.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "auto",
        collective_timeout_s: float = 30.0,
        threads_per_rank: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = make_settings(
            world_size,
            device=device,
            collective_timeout_s=collective_timeout_s,
            threads_per_rank=threads_per_rank,
            env=env or {},
        )
        self._busy = threading.Lock()
        self._closed = False
        self._held = self._hold()
        self._finalizer = weakref.finalize(self, self._held.release)
        _remember(self)

    def run(
        self, fn: Callable[..., Any], *args: Any, deadline_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; the results in rank order.

        `fn` may be a closure or a lambda. Its own names come along by value; names that it lacks
        are looked up on the rank: `rank`, `world_size`, `device`, `torch`, `dist`, and what
        `%%ranks` cells defined. Tensors come back on the CPU.

        Raises TypeError naming what cannot be sent, RankError (RankDied, RankTimeout) for what
        happens on the ranks; `deadline_s` seconds later the work is stopped.
        """
        payload = transport.dump_call(fn, args, kwargs)
        _check_deadline(deadline_s)
        with self._working() as crew:
            sent = crew.folder / "call"
            files = {rank: crew.folder / f"result{rank}" for rank in range(self.world_size)}
            codes = {r: f"__lab__.call({str(sent)!r}, {str(f)!r})" for r, f in files.items()}
            try:
                sent.write_bytes(payload)
                self._run_cell(crew, codes, deadline_s)
                return [transport.load(file.read_bytes()) for file in files.values()]
            finally:
                for file in (sent, *files.values()):
                    file.unlink(missing_ok=True)

    def execute(
        self, code: str, *, ranks: Iterable[int] | None = None, deadline_s: float | None = None
    ) -> None:
        """Run code on some ranks (all by default), its output shown here, tagged by rank."""
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in chosen if rank not in range(self.world_size)]
        if wrong or not chosen:
            raise ValueError(
                f"ranks={wrong or chosen} are not among the ranks of this pool; "
                f"choose from 0 to {self.world_size - 1}"
            )
        _check_deadline(deadline_s)
        with self._working() as crew:
            self._run_cell(crew, dict.fromkeys(chosen, code), deadline_s)

    def restart(self) -> None:
        """End the ranks and start new ones, with empty memory."""
        self._check_open()
        self._end_crew()
        self._start_crew()

    def close(self) -> None:
        """End the ranks. Calling it again does nothing."""
        self._closed = True
        self._finalizer()

    @property
    def world_size(self) -> int:
        return self._settings.world_size

    @property
    def backend(self) -> str:
        """`gloo` or `nccl`."""
        return self._settings.backend

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._settings.device

    @property
    def threads_per_rank(self) -> int:
        return self._settings.threads

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order, empty when closed."""
        crew = self._held.crew
        return [] if crew is None or crew.closed else list(crew.pids)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"Ranks({self.world_size}), closed"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        threads = "1 thread" if self.threads_per_rank == 1 else f"{self.threads_per_rank} threads"
        return f"{ranks} on {self.device} ({self.backend}), {threads} each"

    def _run_cell(self, crew: Crew, codes: dict[int, str], deadline_s: float | None) -> None:
        cell = Cell(crew, codes, Output())
        try:
            in_time = cell.run(deadline_s=deadline_s)
            has_cause = any(s.error or s.ended for s in cell.shares.values())
            stacks = {} if in_time else crew.stacks(cell.running())
            if not in_time:
                cell.stop()
        except KeyboardInterrupt:
            raise Interrupted(*self._stop(cell)) from None
        if in_time or has_cause:  # a failure before the deadline is the cause of what waits
            error = explain(cell)
        else:
            error = deadline_passed(cell, deadline_s or 0.0, stacks)
        if error is not None:
            error.note = self._heal(cell)
            raise error

    def _stop(self, cell: Cell) -> tuple[dict[int, str], str]:
        """After Ctrl-C: where the ranks stood, and what became of them."""
        try:
            stacks = cell.crew.stacks(cell.running())
            cell.stop()
            return stacks, self._heal(cell)
        except KeyboardInterrupt:  # a second one: no more patience
            self._end_crew()
            return {}, ENDED_NOTE

    def _heal(self, cell: Cell) -> str:
        """Bring the ranks into a state from which the next cell works; what that took."""
        crew = cell.crew
        if crew.ended():
            self._end_crew()
            return ENDED_NOTE
        if crew.board.is_level() and not any(s.broke_group for s in cell.shares.values()):
            return ""
        if self.backend == "gloo":
            try:
                crew.rejoin()
                return REJOINED_NOTE
            except RankError:
                pass  # a rank does not answer; start over
            except BaseException:  # interrupted half-way: some are in the new group, some not
                self._end_crew()
                raise
        self._end_crew()
        return ENDED_NOTE

    def _working(self) -> _Working:
        self._check_open()
        return _Working(self)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this pool is closed; Ranks({self.world_size}) starts a new one")

    def _hold(self) -> _Held:
        shared = launch.prestarted()
        held = _Held(shared or launch.choose_launcher(), owns_launcher=shared is None)
        try:
            held.crew = Crew(held.launcher, self._settings)
        except BaseException:
            held.release()
            raise
        return held

    def _end_crew(self) -> None:
        if self._held.crew is not None:
            self._held.crew.close()

    def _start_crew(self) -> Crew:
        if not self._held.launcher.alive():
            if self._held.owns_launcher:
                self._held.launcher.close()
            self._held.launcher, self._held.owns_launcher = launch.choose_launcher(), True
        self._held.crew = Crew(self._held.launcher, self._settings)
        return self._held.crew


class _Working:
    """One call at a time, on ranks that live."""

    def __init__(self, pool: Ranks) -> None:
        self._pool = pool

    def __enter__(self) -> Crew:
        pool = self._pool
        if not pool._busy.acquire(blocking=False):
            raise RuntimeError("the ranks are busy with another call; wait for it to end")
        try:
            crew = pool._held.crew
            if crew is None or crew.closed or crew.ended():
                pool._end_crew()
                crew = pool._start_crew()
                sys.stdout.write(RESTARTED + "\n")
            return crew
        except BaseException:
            pool._busy.release()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._pool._busy.release()


_pools: list[weakref.ref[Ranks]] = []


def _remember(pool: Ranks) -> None:
    _pools.append(weakref.ref(pool))


def latest_pool() -> Ranks | None:
    """Of the pools that are still open, the one made last: the one that `%%ranks` means."""
    while _pools:
        pool = _pools[-1]()
        if pool is not None and not pool.is_closed:
            return pool
        _pools.pop()
    return None


def _check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"{deadline_s=} must be a number of seconds above 0; None sets no limit")
