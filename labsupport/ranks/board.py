"""Which collective does each rank call, and with what? A board that every rank writes on.

    row of rank r:  [current slot | slot 0 | slot 1 | … ]      one shared file, mapped by all

Before a collective starts, its rank writes a note (group, sequence number, operation, shape) on
its row and reads what the other members wrote at the same place. Whoever comes second sees a
difference before a byte is sent. When a rank waits in vain, the notes tell for whom. Nothing here
is sent over the network, and a row can be read after its rank has died.

    board = Board(path, rank=0, world_size=2)
    with board.note("WORLD", members=[0, 1], call="all_reduce(float32[4], sum)"): ...
"""

from __future__ import annotations

import json
import mmap
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from labsupport.ranks.errors import CollectiveMismatch

NUM_SLOTS = 64
SLOT_BYTES = 1024
ROW_BYTES = (NUM_SLOTS + 1) * SLOT_BYTES
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
    """`inside`, `done` or `failed`."""


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

    def close(self) -> None:
        self._map.close()

    def reset_row(self) -> None:
        """Forget this rank's notes: its process groups are new."""
        assert self.rank is not None
        self._sequences.clear()
        start = self.rank * ROW_BYTES
        self._map[start : start + ROW_BYTES] = bytes(ROW_BYTES)

    @contextmanager
    def note(self, group: str, *, members: Sequence[int], call: str) -> Iterator[None]:
        """Stand on the board while the body runs. Raises CollectiveMismatch before it does."""
        assert self.rank is not None
        sequence = self._sequences[group] = self._sequences.get(group, 0) + 1
        now = time.monotonic()
        note = Note(group, sequence, call, list(members), now, "inside")
        slot = _slot_of(group, sequence)
        self._write(slot, note)
        self._set_current(slot)
        state = "failed"
        try:
            if group != POINT_TO_POINT:
                self._compare(note)
            yield
            state = "done"
        finally:
            self._write(slot, Note(group, sequence, call, list(members), now, state))

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
        """How many collectives `rank` has called on this group; 0 if none is left to see."""
        notes = (self._read(rank, slot) for slot in range(NUM_SLOTS))
        return max((n.sequence for n in notes if n is not None and n.group == group), default=0)

    def is_level(self) -> bool:
        """Whether every rank called the same collectives to their end."""
        last: dict[str, dict[int, int]] = {}
        for rank in range(self.world_size):
            for slot in range(NUM_SLOTS):
                note = self._read(rank, slot)
                if note is None:
                    continue
                if note.state != "done":
                    return False
                if note.group != POINT_TO_POINT:
                    counts = last.setdefault(note.group, dict.fromkeys(note.members, 0))
                    counts[rank] = max(counts.get(rank, 0), note.sequence)
        return all(len(set(counts.values())) == 1 for counts in last.values())

    def _compare(self, mine: Note) -> None:
        for other in mine.members:
            theirs = self.find(other, mine.group, mine.sequence)
            if theirs is not None and theirs.call != mine.call:
                calls = sorted([(self.rank, mine.call), (other, theirs.call)])
                told = ", ".join(f"rank {rank} calls {call}" for rank, call in calls)
                where = "" if mine.group == "WORLD" else f" of group {mine.group}"
                raise CollectiveMismatch(
                    f"ranks disagree about collective {mine.sequence}{where}: {told}"
                )

    def _set_current(self, slot: int) -> None:
        assert self.rank is not None
        struct.pack_into("<i", self._map, self.rank * ROW_BYTES, slot + 1)

    def _write(self, slot: int, note: Note) -> None:
        assert self.rank is not None
        content = json.dumps(asdict(note)).encode()
        if len(content) > SLOT_BYTES - 8:  # hundreds of members: the first tell enough
            content = json.dumps(asdict(note) | {"members": note.members[:32]}).encode()
        start = self.rank * ROW_BYTES + (slot + 1) * SLOT_BYTES
        # A reader may copy while this is written; the checksum tells a torn note from a whole one.
        struct.pack_into("<II", self._map, start, len(content), zlib.crc32(content))
        self._map[start + 8 : start + 8 + len(content)] = content

    def _read(self, rank: int, slot: int) -> Note | None:
        start = rank * ROW_BYTES + (slot + 1) * SLOT_BYTES
        length, checksum = struct.unpack_from("<II", self._map, start)
        if not 0 < length <= SLOT_BYTES - 8:
            return None
        content = self._map[start + 8 : start + 8 + length]
        if zlib.crc32(content) != checksum:
            return None  # caught while it is written
        return Note(**json.loads(content))


def _slot_of(group: str, sequence: int) -> int:
    """The last slot is for point-to-point calls, where only the latest one tells anything."""
    if group == POINT_TO_POINT:
        return NUM_SLOTS - 1
    return (zlib.crc32(group.encode()) + sequence) % (NUM_SLOTS - 1)
