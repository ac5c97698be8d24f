"""What can go wrong on a rank, as exceptions that put the first cause first.

    try:
        ranks.run(step)
    except RankError as error:
        error.rank, error.remote_traceback, error.others     # who, where, and the others' fate

A notebook shows `_render_traceback_`: the rank's own traceback, not the pool's.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping


class CollectiveMismatch(RuntimeError):
    """Raised on a rank whose collective differs from what another rank calls at the same place."""


class RankError(RuntimeError):
    """A rank failed. The text names the first rank that did and why."""

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        remote_traceback: str = "",
        others: Mapping[int, str] | None = None,
        note: str = "",
    ) -> None:
        super().__init__(summary)
        self.rank = rank
        """The first rank that failed."""
        self.remote_traceback = remote_traceback
        """Its traceback as text, as that rank saw it."""
        self.others = dict(others or {})
        """One line for each other rank that did not finish: rank -> what became of it."""
        self.note = note
        """What happened to the pool, empty if nothing did."""

    def _details(self) -> list[str]:
        """Lines shown between the summary and the fate of the other ranks."""
        return self.remote_traceback.rstrip().splitlines()

    def _render_traceback_(self) -> list[str]:
        lines = [f"{type(self).__name__}: {self}"]
        details = self._details()
        if details:
            lines += ["", *details]
        if self.others:
            lines += ["", *(f"rank {rank}: {fate}" for rank, fate in sorted(self.others.items()))]
        if self.note:
            lines += ["", self.note]
        return lines


class RankDied(RankError):
    """A rank's process ended. `exit_code` is negative for a signal, as in subprocess."""

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        exit_code: int | None,
        remote_traceback: str = "",
        others: Mapping[int, str] | None = None,
        note: str = "",
    ) -> None:
        super().__init__(
            summary, rank=rank, remote_traceback=remote_traceback, others=others, note=note
        )
        self.exit_code = exit_code
        """As subprocess has it; None if nobody was left to report it."""


class RankTimeout(RankError):
    """Some ranks did not answer: a deadline passed, or a collective that not every rank called."""

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        waiting: list[int],
        stacks: Mapping[int, str],
        others: Mapping[int, str] | None = None,
        note: str = "",
    ) -> None:
        super().__init__(
            summary, rank=rank, remote_traceback=stacks.get(rank, ""), others=others, note=note
        )
        self.waiting = waiting
        """Ranks that had not answered."""
        self.stacks = dict(stacks)
        """Where each of them stood: rank -> stack as text, innermost call last."""

    def _details(self) -> list[str]:
        return stack_lines(self.stacks)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while ranks were running: shows where each of them stood."""

    def __init__(self, stacks: Mapping[int, str], note: str) -> None:
        super().__init__("interrupted while the ranks were running")
        self.stacks = dict(stacks)
        self.note = note

    def _render_traceback_(self) -> list[str]:
        lines = ["KeyboardInterrupt: the ranks were stopped", "", *stack_lines(self.stacks)]
        return [*lines, "", self.note] if self.note else lines


def stack_lines(stacks: Mapping[int, str]) -> list[str]:
    """Stacks of several ranks as lines for a person."""
    lines: list[str] = []
    for rank, stack in sorted(stacks.items()):
        lines += [f"rank {rank} stood at:", *stack.rstrip().splitlines(), ""]
    return lines[:-1]


def exit_reason(exit_code: int | None) -> str:
    """`killed by signal 9 (SIGKILL)` or `exit code 3`."""
    if exit_code is None:
        return "its exit code is not known"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-exit_code} ({name})"
