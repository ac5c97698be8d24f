"""Why did a cell fail? From what every rank did to one exception, the first cause first.

    error = explain(cell)          # None if every rank succeeded

Order: a process that died; an exception of a rank's own; a rank that did not come to a collective.
What merely followed (a lost connection, a freed wait) is told in a line for each rank.
"""

from __future__ import annotations

import re

from labsupport.ranks.board import POINT_TO_POINT, Note
from labsupport.ranks.cell import Cell, Share, ranks_in_words
from labsupport.ranks.errors import (
    CollectiveMismatch,
    RankDied,
    RankError,
    RankTimeout,
    exit_reason,
)

TOGETHER_S = 0.02
ALIKE_S = 2.0
ENDED = "  (it had ended the cell)"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def explain(cell: Cell) -> RankError | None:
    """The exception that tells what happened, None if nothing did."""
    shares = cell.shares
    died = [r for r, s in shares.items() if s.ended and not s.killed]
    own = [r for r, s in shares.items() if _is_own_failure(s)]
    if died:
        return _death(cell, died[0])
    if own:
        return _own_failure(cell, _first(cell, own))
    if cell.stuck is not None:
        return _absence(cell, cell.stuck.notes, cell.stuck.stacks)
    if any(s.timed_out for s in shares.values()):
        late = [r for r, s in shares.items() if s.timed_out or s.lost_connection]
        notes = {
            rank: note
            for rank in late
            if (note := cell.crew.board.current(rank)) is not None and note.state != "done"
        }
        tracebacks = {r: _traceback(shares[r]) for r in late}
        return _absence(cell, notes, tracebacks | cell.stopped_at)
    rest = [r for r, s in shares.items() if s.error or s.ended]
    return _own_failure(cell, _first(cell, rest)) if rest else None


def deadline_passed(cell: Cell, deadline_s: float, stacks: dict[int, str]) -> RankTimeout:
    """The exception for a cell that was stopped at its deadline."""
    waiting = sorted(stacks)
    return RankTimeout(
        f"{ranks_in_words(waiting)} did not answer within the deadline of {deadline_s:g} s",
        rank=waiting[0],
        waiting=waiting,
        stacks=_with_the_rest(cell, stacks),
        others=_others(cell, set(waiting)),
    )


def _with_the_rest(cell: Cell, stacks: dict[int, str]) -> dict[int, str]:
    """Also where those ranks stand that are not running any more."""
    rest = {rank: _traceback(s) or ENDED for rank, s in cell.shares.items() if not s.ended}
    return rest | stacks


def _death(cell: Cell, rank: int) -> RankDied:
    share = cell.shares[rank]
    summary = f"rank {rank} died: {exit_reason(share.exit_code)}"
    return RankDied(
        summary,
        rank=rank,
        exit_code=share.exit_code,
        remote_traceback=cell.crew.dumped_stack(rank),
        others=_others(cell, {rank}),
    )


def _own_failure(cell: Cell, rank: int) -> RankError:
    share = cell.shares[rank]
    error = share.error or {"ename": "killed", "evalue": "it did not react"}
    told = f"{error['ename']}: {error['evalue']}" if error["evalue"] else error["ename"]
    mismatch = _mismatch(cell, rank) if error["ename"] == CollectiveMismatch.__name__ else ""
    return RankError(
        mismatch or f"rank {rank} failed: {told}",
        rank=rank,
        remote_traceback=_traceback(share),
        others=_others(cell, {rank}),
    )


def _mismatch(cell: Cell, rank: int) -> str:
    """What all ranks called at the place where they disagree, those of one mind together."""
    place = cell.crew.board.current(rank)
    if place is None:
        return ""
    calls: dict[str, list[int]] = {}
    for member in place.members:
        note = cell.crew.board.find(member, place.group, place.sequence)
        if note is not None:
            calls.setdefault(note.call, []).append(member)
    told = ", ".join(
        f"{ranks_in_words(ranks)} {'calls' if len(ranks) == 1 else 'call'} {call}"
        for call, ranks in calls.items()
    )
    where = "" if place.group == "WORLD" else f" of group {place.group}"
    return f"ranks disagree about collective {place.sequence}{where}: {told}"


def _absence(cell: Cell, notes: dict[int, Note], stacks: dict[int, str]) -> RankTimeout:
    """Some waited in a collective; name who did not come, or what each of them waited in."""
    waiting = sorted(notes or stacks)
    stacks = _with_the_rest(cell, stacks)
    for rank, note in sorted(notes.items()):
        absent = [member for member in note.members if _did_not_come(cell, member, note)]
        if not absent:
            continue
        if note.group == POINT_TO_POINT:
            summary = f"rank {rank} waited in {note.call}: {_whereabouts(cell, absent)}"
        else:
            there = sorted(set(note.members) - set(absent))
            summary = (
                f"{ranks_in_words(absent)} did not come to {note.call}: "
                f"{_whereabouts(cell, absent)}; {ranks_in_words(there)} waited there"
            )
        return RankTimeout(
            summary,
            rank=absent[0],
            waiting=waiting,
            stacks=stacks,
            others=_others(cell, {*absent, *waiting}),
        )
    over = [rank for rank, share in cell.shares.items() if share.error is None]
    if over and not notes:  # C++ code called the collective, which leaves no note
        return RankTimeout(
            f"{ranks_in_words(waiting)} waited in a collective to which "
            f"{ranks_in_words(over)} did not come",
            rank=over[0],
            waiting=waiting,
            stacks=stacks,
            others=_others(cell, {*over, *waiting}),
        )
    calls = "; ".join(f"rank {rank} waited in {note.call}" for rank, note in sorted(notes.items()))
    limit = cell.crew.settings.collective_timeout_s
    return RankTimeout(
        f"nothing moved for {limit:g} s: {calls or ranks_in_words(waiting) + ' waited'}",
        rank=waiting[0],
        waiting=waiting,
        stacks=stacks,
        others=_others(cell, set(waiting)),
    )


def _did_not_come(cell: Cell, member: int, note: Note) -> bool:
    if note.group == POINT_TO_POINT:
        theirs = cell.crew.board.current(member)
        over = member not in cell.shares or cell.shares[member].error is None
        return over and (theirs is None or theirs.state == "done")
    return cell.crew.board.last_sequence(member, note.group) < note.sequence


def _whereabouts(cell: Cell, absent: list[int]) -> str:
    it, was = ("it", "was") if len(absent) == 1 else ("they", "were")
    shares = [cell.shares.get(rank) for rank in absent]
    if any(share is None for share in shares):
        return f"{it} {was} not asked to run this cell"
    if all(share is not None and share.error is None and not share.ended for share in shares):
        return f"{it} had ended the cell"
    return f"{it} {was} doing something else"


def _others(cell: Cell, told: set[int]) -> dict[int, str]:
    """A line for each rank that did not finish and is not told of already."""
    return {
        rank: _fate(cell, rank)
        for rank, share in cell.shares.items()
        if rank not in told and (share.error or share.ended or share.freed)
    }


def _fate(cell: Cell, rank: int) -> str:
    """One line on a rank that is not the first cause."""
    share = cell.shares[rank]
    if share.killed:
        return "did not react to an interrupt and was killed"
    if share.ended:
        return f"died: {exit_reason(share.exit_code)}"
    if share.waited_in is not None:
        return f"waited in {share.waited_in.call} and was freed"
    if share.freed:
        return "was still running and was interrupted"
    if share.lost_connection or share.timed_out:
        return "lost its connection and stopped in consequence"
    if share.error is not None:
        return f"also failed: {share.error['ename']}: {share.error['evalue']}".splitlines()[0]
    return "had ended the cell"


def _is_own_failure(share: Share) -> bool:
    return bool(
        share.error and not share.freed and not share.lost_connection and not share.timed_out
    )


def _first(cell: Cell, failed: list[int]) -> int:
    """The rank that failed first; of those that failed together, or alike soon after, the lowest.

    Where all ranks make the same mistake, which of them the scheduler let run first tells nothing.
    """
    first = min(failed, key=lambda rank: _when(cell.shares[rank]))
    begun = _when(cell.shares[first])

    def counts(rank: int) -> bool:
        later_s = _when(cell.shares[rank]) - begun
        alike = _told(cell.shares[rank]) == _told(cell.shares[first])
        return later_s <= (ALIKE_S if alike else TOGETHER_S)

    return min(rank for rank in failed if counts(rank))


def _told(share: Share) -> tuple[str, str] | None:
    return (share.error["ename"], share.error["evalue"]) if share.error else None


def _when(share: Share) -> float:
    """When the rank's error left it, on the clock that all ranks share."""
    if share.reply is None:
        return share.over_s or 0.0
    return float(share.reply["header"]["date"].timestamp())


def _traceback(share: Share) -> str:
    return ANSI.sub("", "\n".join(share.error["traceback"])) if share.error else ""
