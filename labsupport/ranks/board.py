"""Which collective does each rank call, and with what? A board that every rank writes on.

    row of rank r:  [current slot | slot 0 | slot 1 | … | counts]     one file, mapped by all

Before a collective starts, its rank writes a note (group, sequence number, operation, shape) on
its row and reads what the other members wrote at the same place. Whoever comes second sees a
difference before a byte is sent. When a rank waits in vain, the notes tell for whom. Nothing here
is sent over the network, and a row can be read after its rank has died.

    board = Board(path, rank=0, world_size=2)
    slot = board.enter("WORLD", members=[0, 1], call="all_reduce(float32[4], sum)")
    ...                                                # the call itself
    board.leave(slot, "done")
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from labsupport.ranks.errors import CollectiveMismatch

NUM_SLOTS = 64
SLOT_BYTES = 1024
ROW_BYTES = (NUM_SLOTS + 2) * SLOT_BYTES
COUNT = struct.Struct("<II")  # checksum of a group's name, collectives called on it
HEADER = struct.Struct("<BxxxII")  # state, length and checksum of the note that follows
STATES = ("inside", "done", "failed")
POINT_TO_POINT = "point-to-point"


@dataclass(frozen=True)
class Note:
    """One call of one rank."""

    group: str
    """Name of the process group, or POINT_TO_POINT."""
    sequence: int
    """How many collectives this rank had called on this group before, plus one."""
    call: str
    """For people: `all_reduce(float32[4], sum)`."""
    members: list[int]
    entered_s: float
    """On the machine's monotonic clock, which all ranks share."""
    state: str
    """One of STATES."""


class Board:
    """The board as one rank (or, with rank None, the notebook) sees it."""

    def __init__(self, path: Path, *, rank: int | None, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        size = ROW_BYTES * world_size
        if rank is None:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._sequences: dict[str, int] = {}

    def reset_row(self) -> None:
        """Forget this rank's notes: its process groups are new."""
        assert self.rank is not None
        self._sequences.clear()
        start = self.rank * ROW_BYTES
        self._map[start : start + ROW_BYTES] = bytes(ROW_BYTES)

    def enter(self, group: str, *, members: Sequence[int], call: str) -> int:
        """Write a note and compare it with the others'; the slot, for `leave`.

        Raises CollectiveMismatch where another rank wrote a different call at the same place.
        This stands before every collective, so it has to cost microseconds.
        """
        assert self.rank is not None
        sequence = self._sequences[group] = self._sequences.get(group, 0) + 1
        slot = _slot_of(group, sequence)
        self._count(group, sequence)
        place = f"{group}\n{sequence}\n{call}\n".encode()
        self._write(slot, place, members)
        struct.pack_into("<i", self._map, self.rank * ROW_BYTES, slot + 1)
        if group != POINT_TO_POINT:
            for other in members:
                start = _start_of(other, slot) + HEADER.size
                if self._map[start : start + len(place)] != place:
                    self._compare(slot, other, group, sequence, call)
        return slot

    def leave(self, slot: int, state: str) -> None:
        """The call that `enter` announced is over."""
        assert self.rank is not None
        self._map[_start_of(self.rank, slot)] = STATES.index(state)

    def current(self, rank: int) -> Note | None:
        """The last call that `rank` began, whether it is still inside or not."""
        (slot,) = struct.unpack_from("<i", self._map, rank * ROW_BYTES)
        return self._read(rank, slot - 1) if slot > 0 else None

    def find(self, rank: int, group: str, sequence: int) -> Note | None:
        """What `rank` wrote for the given place, None if it did not come or it is long past."""
        note = self._read(rank, _slot_of(group, sequence))
        if note is None or note.group != group or note.sequence != sequence:
            return None
        return note

    def last_sequence(self, rank: int, group: str) -> int:
        """How many collectives `rank` has called on this group."""
        start = _start_of(rank, NUM_SLOTS)
        counts = COUNT.iter_unpack(self._map[start : start + SLOT_BYTES])
        key = crc32(group.encode())
        return next((count for known, count in counts if known == key and count), 0)

    def is_level(self) -> bool:
        """Whether every rank called the same collectives to their end."""
        members_of: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            for slot in range(NUM_SLOTS):
                note = self._read(rank, slot)
                if note is not None and note.state != "done":
                    return False
                if note is not None and note.group != POINT_TO_POINT:
                    members_of[note.group] = note.members
        return all(
            len({self.last_sequence(member, group) for member in members}) == 1
            for group, members in members_of.items()
        )

    def _compare(self, slot: int, other: int, group: str, sequence: int, call: str) -> None:
        theirs = self.find(other, group, sequence)
        if theirs is None or theirs.call == call:
            return
        self.leave(slot, "failed")
        calls = sorted([(self.rank, call), (other, theirs.call)])
        told = ", ".join(f"rank {rank} calls {text}" for rank, text in calls)
        where = "" if group == "WORLD" else f" of group {group}"
        raise CollectiveMismatch(f"ranks disagree about collective {sequence}{where}: {told}")

    def _count(self, group: str, sequence: int) -> None:
        """Kept apart from the notes, which the notes of other groups push out."""
        assert self.rank is not None
        if len(self._sequences) <= SLOT_BYTES // COUNT.size:
            place = list(self._sequences).index(group)
            start = _start_of(self.rank, NUM_SLOTS) + place * COUNT.size
            COUNT.pack_into(self._map, start, crc32(group.encode()), sequence)

    def _write(self, slot: int, place: bytes, members: Sequence[int]) -> None:
        assert self.rank is not None
        start = _start_of(self.rank, slot)
        room = SLOT_BYTES - HEADER.size
        for count in (len(members), 32):  # of hundreds of members, the first tell enough
            named = ",".join(map(str, members[:count]))
            content = place + f"{named}\n{time.monotonic()}".encode()
            if len(content) <= room:
                break
        content = content[:room]
        # A reader may copy while this is written; the checksum tells a torn note from a whole one.
        HEADER.pack_into(self._map, start, STATES.index("inside"), len(content), crc32(content))
        self._map[start + HEADER.size : start + HEADER.size + len(content)] = content

    def _read(self, rank: int, slot: int) -> Note | None:
        start = _start_of(rank, slot)
        state, length, checksum = HEADER.unpack_from(self._map, start)
        if not 0 < length <= SLOT_BYTES - HEADER.size:
            return None
        content = self._map[start + HEADER.size : start + HEADER.size + length]
        if crc32(content) != checksum:
            return None  # caught while it is written
        group, sequence, call, members, entered_s = content.decode().split("\n")
        ranks = [int(member) for member in members.split(",")]
        return Note(group, int(sequence), call, ranks, float(entered_s), STATES[state])


def _start_of(rank: int, slot: int) -> int:
    return rank * ROW_BYTES + (slot + 1) * SLOT_BYTES


def _slot_of(group: str, sequence: int) -> int:
    """The last slot is for point-to-point calls, where only the latest one tells anything."""
    if group == POINT_TO_POINT:
        return NUM_SLOTS - 1
    return (crc32(group.encode()) + sequence) % (NUM_SLOTS - 1)
