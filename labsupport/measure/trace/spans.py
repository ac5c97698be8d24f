"""Spans on a time line, and how much communication no computation hides.

    compute        ████████████████░░░░░░░░████
    communication      ▬▬▬▬▬  ▬▬▬▬▬▬▬▬▬▬▬▬▬
    exposed                         ▬▬▬▬▬▬▬

    trace = Trace((Span(rank=0, stream=COMPUTE, name="backward", start_s=0.0, end_s=1.0), …))
    trace.communication_s(0), trace.exposed_s(0), trace.hidden_share(0)

Times are those of `time.monotonic`, which all processes of one Linux machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

Stream = Literal["compute", "communication"]
COMPUTE: Stream = "compute"
COMMUNICATION: Stream = "communication"
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank did from `start_s` to `end_s`."""

    rank: int
    stream: Stream
    name: str
    start_s: float
    end_s: float
    size_bytes: int = 0
    """communication only: of the tensor that was handed over."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks on one clock that begins at 0."""

    spans: tuple[Span, ...]

    @classmethod
    def of_ranks(cls, spans_of_ranks: Iterable[Sequence[Span]]) -> Self:
        """Lay what each rank recorded side by side; the earliest span starts at 0.

        Raises ValueError when no rank recorded anything.
        """
        spans = [span for spans in spans_of_ranks for span in spans]
        if not spans:
            raise ValueError("no spans were recorded; run a training step inside record_trace")
        origin = min(span.start_s for span in spans)
        moved = [
            replace(span, start_s=span.start_s - origin, end_s=span.end_s - origin)
            for span in spans
        ]
        return cls(tuple(sorted(moved, key=lambda span: (span.rank, span.start_s))))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a span."""
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def duration_s(self) -> float:
        """From the first start to the last end, over all ranks."""
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    def busy(self, rank: int, stream: Stream) -> list[Interval]:
        """When `stream` of `rank` did anything: apart, in order."""
        chosen = [span for span in self.spans if span.rank == rank and span.stream == stream]
        return unite((span.start_s, span.end_s) for span in chosen)

    def exposed(self, rank: int) -> list[Interval]:
        """When messages of `rank` were under way while it computed nothing."""
        return subtract(self.busy(rank, COMMUNICATION), self.busy(rank, COMPUTE))

    def compute_s(self, rank: int) -> float:
        """Seconds in which `rank` computed."""
        return _length(self.busy(rank, COMPUTE))

    def communication_s(self, rank: int) -> float:
        """Seconds in which at least one message of `rank` was under way."""
        return _length(self.busy(rank, COMMUNICATION))

    def exposed_s(self, rank: int) -> float:
        """Seconds by which communication made the step of `rank` longer."""
        return _length(self.exposed(rank))

    def hidden_share(self, rank: int) -> float:
        """Share of the communication that ran behind computation; 0 where there was none."""
        under_way = self.communication_s(rank)
        return 1 - self.exposed_s(rank) / under_way if under_way else 0.0

    def __repr__(self) -> str:
        head = f"{'rank':>4}  {'compute':>9}  {'communication':>13}  {'exposed':>9}  hidden"
        lines = [
            f"{rank:>4}  {self.compute_s(rank) * 1e3:>6.1f} ms  "
            f"{self.communication_s(rank) * 1e3:>10.1f} ms  "
            f"{self.exposed_s(rank) * 1e3:>6.1f} ms  {self.hidden_share(rank):>6.0%}"
            for rank in self.ranks
        ]
        return "\n".join([head, *lines])


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Overlapping and touching intervals become one; in order."""
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        elif end > start:
            united.append((start, end))
    return united


def subtract(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of `whole` is not covered by `taken`; both as from `unite`."""
    left = []
    for start, end in whole:
        for first, last in taken:
            if last <= start or first >= end:
                continue
            if first > start:
                left.append((start, first))
            start = max(start, last)
        if start < end:
            left.append((start, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
