"""What the owner tells a rank at its start, and the files they share. Travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankSpec:
    """All that a rank has to know when it starts."""

    rank: int
    world_size: int
    backend: str
    device: str
    threads: int
    collective_timeout_s: float
    folder: str
    """Files that this rank shares with its owner; the owner makes and removes the folder."""
    cwd: str
    env: dict[str, str]
    """The whole environment, not only what differs."""
    python_path: list[str]

    @property
    def connection_file(self) -> Path:
        return Path(self.folder) / f"rank{self.rank}.json"

    @property
    def log_file(self) -> Path:
        """What the rank writes to file descriptors 1 and 2, past Python's own streams."""
        return Path(self.folder) / f"rank{self.rank}.log"

    @property
    def stack_file(self) -> Path:
        return Path(self.folder) / f"rank{self.rank}.stack"

    @property
    def board_file(self) -> Path:
        return Path(self.folder) / "board"
