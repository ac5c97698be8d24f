"""One cell on some ranks: send it, show its output, and see that it ends.

    cell = Cell(crew, {0: code, 1: code}, output)
    cell.run(deadline_s=None)           # returns when no rank is running any more
    cell.shares[1].reply, cell.stuck    # what `diagnose` makes an exception of

A rank that waits for one that will not come is found by the board and freed. A rank that goes on
long after another has failed is interrupted. What answers to nothing is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from labsupport.ranks.board import POINT_TO_POINT, Note
from labsupport.ranks.channel import Message
from labsupport.ranks.crew import Crew
from labsupport.ranks.output import EARLIER, Output

TICK_S = 0.05
LOOK_EVERY_S = 0.2
STUCK_S = 1.0
"""A collective is in vain once a member has ended its cell this long ago without having come."""
STUCK_PEER_S = 3.0
"""The same for send and recv, where a message may still be on its way."""
AFTER_FAILURE_S = 5.0
"""Ranks that still run this long after another has failed are interrupted."""
OBEY_S = 2.0
"""How long a rank may take to react before something stronger is done."""
SHOWN = ("display_data", "execute_result", "update_display_data")
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "caused pair closure",
)
TIMED_OUT = "Timed out waiting"


@dataclass
class Share:
    """What one rank has done of the cell."""

    message_id: str
    reply: Message | None = None
    is_idle: bool = False
    ended: bool = False
    """Its process is gone; `exit_code` tells how."""
    exit_code: int | None = None
    killed: bool = False
    """The pool ended it, since it did not react."""
    freed: bool = False
    """The pool cut its connections or interrupted it."""
    over_s: float | None = None
    waited_in: Note | None = None
    """The collective it stood in when it was freed."""

    @property
    def error(self) -> Mapping[str, Any] | None:
        """Content of the reply if the code failed."""
        if self.reply is None or self.reply["content"]["status"] == "ok":
            return None
        content: Mapping[str, Any] = self.reply["content"]
        return content

    @property
    def lost_connection(self) -> bool:
        """Whether it failed because another rank did."""
        return any(words in self._told for words in LOST_CONNECTION)

    @property
    def timed_out(self) -> bool:
        return TIMED_OUT in self._told

    @property
    def _told(self) -> str:
        return str(self.error["evalue"]) if self.error else ""

    @property
    def broke_group(self) -> bool:
        """Whether the process group cannot be used any more: its connections are gone."""
        return self.freed or self.lost_connection or self.timed_out


@dataclass
class Stuck:
    """Ranks that waited in vain: found by the board, before the backend's own time-out."""

    notes: dict[int, Note]
    stacks: dict[int, str]


@dataclass
class Cell:
    """One request to some ranks of a crew."""

    crew: Crew
    codes: Mapping[int, str]
    output: Output
    shares: dict[int, Share] = field(default_factory=dict)
    stuck: Stuck | None = None
    stopped_at: dict[int, str] = field(default_factory=dict)
    """Stacks of ranks that were interrupted after another had failed."""

    def run(self, *, deadline_s: float | None = None) -> bool:
        """Until every rank is done; False if some still run when the deadline has passed."""
        self._take_in_earlier_output()
        for rank, code in self.codes.items():
            self.crew.remember_cell(code)
            self.shares[rank] = Share(self.crew.channels[rank].execute(code))
        end = None if deadline_s is None else time.monotonic() + deadline_s
        in_time = self._wait(lambda: end is not None and time.monotonic() > end)
        if in_time:
            self._finish()
        return in_time

    def running(self) -> list[int]:
        return [rank for rank, share in self.shares.items() if share.over_s is None]

    def failed(self) -> bool:
        return any(s.error or s.ended for s in self.shares.values()) or bool(self.running())

    def stop(self) -> None:
        """Interrupt what runs, then free it, then kill it."""
        for act in (self.crew.interrupt, self.crew.unblock, self._kill):
            for rank in self.running():
                self.shares[rank].waited_in = self._stands_in(rank)
                self.shares[rank].freed = True
                act(rank)
            # Python code reacts at once; only C++ code needs the stronger means.
            patience = 0.5 if act == self.crew.interrupt else OBEY_S
            self._wait_at_most(patience)
        self._finish()

    def _finish(self) -> None:
        self._pump(0.0)
        self.output.finish_lines()
        self.output.show(now=True)

    def _wait_at_most(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() > end, look=False)

    def _wait(self, is_over: Callable[[], bool], *, look: bool = True) -> bool:
        next_look = time.monotonic() + LOOK_EVERY_S
        while self.running():
            if is_over():
                return False
            self._pump(TICK_S)
            if look and time.monotonic() > next_look:
                self._look_after_the_rest()
                next_look = time.monotonic() + LOOK_EVERY_S
        return True

    def _pump(self, wait_s: float) -> None:
        """Take in what has arrived, waiting a little if nothing has; show what is due."""
        poller = zmq.Poller()
        for rank in self.shares:
            poller.register(self.crew.channels[rank].shell, zmq.POLLIN)
            poller.register(self.crew.channels[rank].iopub, zmq.POLLIN)
        poller.poll(int(1000 * self.output.wait_s(wait_s)))
        ended = self.crew.ended()
        for rank, share in self.shares.items():
            for message in self.crew.channels[rank].published():
                self._take_in(rank, message, share)
            for reply in self.crew.channels[rank].replies():
                if reply["parent_header"].get("msg_id") == share.message_id:
                    share.reply = reply
            # Written straight to the file descriptors; it was there before the reply was.
            self.output.add_text(rank, "stdout", self.crew.read_log(rank))
            if share.over_s is None and rank in ended:
                share.ended, share.exit_code = True, ended[rank]
                share.over_s = time.monotonic()
            if share.over_s is None and share.reply is not None and share.is_idle:
                share.over_s = time.monotonic()
        self.output.show()

    def _take_in(self, rank: int, message: Message, share: Share) -> None:
        kind = message["header"]["msg_type"]
        of_this_cell = message["parent_header"].get("msg_id") == share.message_id
        note = "" if of_this_cell else EARLIER
        if kind == "status" and of_this_cell:
            share.is_idle = message["content"]["execution_state"] == "idle"
        elif kind == "stream":
            content = message["content"]
            self.output.add_text(rank, content["name"], content["text"], note=note)
        elif kind in SHOWN:
            self.output.add_display(rank, message, note=note)

    def _take_in_earlier_output(self) -> None:
        """Show, as such, what a rank sent after its last cell had ended."""
        nobody = Share("")
        for rank, channel in enumerate(self.crew.channels):
            for message in channel.published():
                self._take_in(rank, message, nobody)
            if text := self.crew.read_log(rank):
                self.output.add_text(rank, "stdout", text, note=EARLIER)
        self.output.finish_lines()
        self.output.show(now=True)

    def _look_after_the_rest(self) -> None:
        """Free ranks that wait in vain; stop ranks that outlive another's failure for long."""
        over = [s.over_s for s in self.shares.values() if s.over_s is not None]
        if not over and len(self.shares) == self.crew.settings.world_size:
            return
        now = time.monotonic()
        waiting = {
            rank: note for rank in self.running() if (note := self._waits_in_vain(rank, now))
        }
        if waiting and self.stuck is None:
            self.stuck = Stuck(waiting, self.crew.stacks(waiting))
        for rank, note in waiting.items():
            self.shares[rank].freed, self.shares[rank].waited_in = True, note
            self.crew.unblock(rank)
        if waiting:
            self._wait_at_most(OBEY_S)
            for rank in set(waiting) & set(self.running()):
                if self._waits_in_vain(rank, time.monotonic()):  # where nothing can be cut
                    self._kill(rank)
            self._wait_at_most(OBEY_S)
        failures = [
            share.over_s
            for share in self.shares.values()
            if share.over_s is not None and (share.error or share.ended or share.freed)
        ]
        grace = STUCK_S if any(s.timed_out for s in self.shares.values()) else AFTER_FAILURE_S
        if failures and now > min(failures) + grace and self.running():
            self.stopped_at = self.crew.stacks(self.running())
            self.stop()

    def _waits_in_vain(self, rank: int, now: float) -> Note | None:
        """The call in which `rank` waits for someone who has ended the cell without it."""
        note = self._stands_in(rank)
        if note is None:
            return None
        point_to_point = note.group == POINT_TO_POINT
        patience = STUCK_PEER_S if point_to_point else STUCK_S
        for member in note.members:
            if member == rank or member in self.running():
                continue
            share = self.shares.get(member)
            since = max(note.entered_s, (share.over_s or 0.0) if share else 0.0)
            if now < since + patience:
                continue
            theirs = self.crew.board.current(member)
            if point_to_point:
                on_its_way = theirs is not None and theirs.call.startswith(("isend", "irecv"))
                if not on_its_way:
                    return note
                continue
            theirs = self.crew.board.find(member, note.group, note.sequence)
            came = self.crew.board.last_sequence(member, note.group) >= note.sequence
            if not came or (theirs is not None and theirs.state != "done"):
                return note
        return None

    def _stands_in(self, rank: int) -> Note | None:
        note = self.crew.board.current(rank)
        if note is None or note.state == "failed":
            return None
        # nccl only queues a collective and returns; the rank waits where it needs the result.
        only_queued = self.crew.settings.backend == "nccl" and note.group != POINT_TO_POINT
        return note if note.state == "inside" or only_queued else None

    def _kill(self, rank: int) -> None:
        self.shares[rank].killed = True
        self.crew.kill(rank)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1` or `ranks 0, 2 and 3`."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
