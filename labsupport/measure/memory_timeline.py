"""What did a training step hold at each moment, and of what kind was it?

    ┌ step 1 ────────────────────────────────┐┌ step 2 …
    before → forward → backward → update → after → forward …
                  ↑          ↑          ↑
             activations  gradients  optimizer state      (bytes are kept from one ↑ to the next)

    timeline = memory.timeline()                 # of a MemoryTracker
    timeline.peak(step=1).total_bytes            # the most that was held at once, before step 2
    timeline.at("forward", step=2).bytes_of["activations"]

Bytes are those of the tensors. MiB is 2^20 bytes, GiB 2^30.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from labsupport.results.aligned import aligned_html, aligned_text

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "copies",
    "activations",
    "logits",
    "temporary",
    "inputs",
    "buffers",
)
"""In the order in which they are stacked: what stays longest lies at the bottom.

gathered: whole parameters of which the rank keeps a shard, while they are used; copies: of
parameters in another type (autocast); logits: everything whose last dimension is the vocabulary,
with the copies that the loss makes; temporary: gradients of activations, and what soon goes;
inputs: token ids, labels; buffers: of the model, what data parallelism sends from and receives in,
and what else outlives a step.
"""
PHASES = ("before", "forward", "backward", "update", "after")
"""Before the first forward pass; forward pass and loss; backward; clipping and the optimizer's
step; then zero_grad and the next batch."""
_MOMENTS = {
    "forward": "after forward",
    "backward": "after backward",
    "update": "after optimizer",
    "after": "after zero_grad",
}


@dataclass(frozen=True)
class Sample:
    """What is held after one tensor came or went."""

    step: int
    """From 1: a step ends when the optimizer has stepped."""
    phase: str
    bytes_of: Mapping[str, int]
    """Category -> bytes; every one of CATEGORIES is there."""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.bytes_of.values())


@dataclass(frozen=True, kw_only=True)
class AllocatorReading:
    """What CUDA's allocator and driver say at the end of a phase (GPU only)."""

    step: int
    phase: str
    allocated_bytes: int
    """In tensors, each rounded up to 512 bytes."""
    peak_allocated_bytes: int
    """The most within this phase."""
    reserved_bytes: int
    """Taken from the device and kept for reuse; allocated or not."""
    non_torch_bytes: int
    """In use on the device beyond that: CUDA contexts, libraries, other processes."""


@dataclass(frozen=True, repr=False)
class MemoryTimeline:
    """Every moment of the tracked steps; shows itself as a table of its phases. Label: measured."""

    samples: tuple[Sample, ...]
    allocator: tuple[AllocatorReading, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps seen, the last perhaps unfinished."""
        return max(sample.step for sample in self.samples)

    def at(self, phase: str, *, step: int = 1) -> Sample:
        """The state when `phase` of `step` was over: what is then kept for the next one."""
        return self._of(phase, step)[-1]

    def peak(self, *, step: int | None = None, phase: str | None = None) -> Sample:
        """The fullest moment of a step, of a phase, or of everything."""
        return max(self._of(phase, step), key=lambda sample: sample.total_bytes)

    def largest(self, category: str, *, step: int | None = None) -> int:
        """The most bytes that one category ever held."""
        return max(sample.bytes_of[category] for sample in self._of(None, step))

    def rows(self, *, step: int = 1) -> dict[str, Sample]:
        """The moments worth a look, by name: before, after forward, peak of backward, …"""
        found = {"before": self._of("forward", step)[0]}  # where the forward pass begins
        seen = {sample.phase for sample in self.samples if sample.step == step}
        for phase, name in _MOMENTS.items():
            if phase in seen:
                if phase == "backward":
                    found["peak of backward"] = self.peak(phase=phase, step=step)
                found[name] = self.at(phase, step=step)
        return found

    def _of(self, phase: str | None, step: int | None) -> list[Sample]:
        found = [
            sample
            for sample in self.samples
            if (phase is None or sample.phase == phase) and (step is None or sample.step == step)
        ]
        if not found:
            seen = sorted({f"{sample.phase} of step {sample.step}" for sample in self.samples})
            raise ValueError(f"{phase=}, {step=} was not seen; there is {', '.join(seen)}")
        return found

    def table(self) -> list[list[str]]:
        """Header and lines: the moments of every step, a column for each category in use."""
        used = [c for c in CATEGORIES if any(sample.bytes_of[c] for sample in self.samples)]
        size, unit = _unit(self.peak().total_bytes)
        lines = [[f"{unit}, measured", *used, "total"]]
        for step in range(1, self.num_steps + 1):
            for name, sample in self.rows(step=step).items():
                cells = [*(sample.bytes_of[c] for c in used), sample.total_bytes]
                texts = [f"{num_bytes / size:.2f}" for num_bytes in cells]
                lines.append([f"step {step}, {name}", *texts])
        return lines

    def __repr__(self) -> str:
        return aligned_text(self.table())

    def _repr_html_(self) -> str:
        return aligned_html(self.table())


def _unit(largest_bytes: int) -> tuple[int, str]:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if largest_bytes >= size:
            return size, unit
    return 2**10, "KiB"


@dataclass(slots=True, eq=False)
class Holding:
    """A tensor's memory. What it is may be known only later, and is then true from its birth."""

    num_bytes: int
    category: str
    alive: bool = True


@dataclass(slots=True, frozen=True)
class Event:
    """A holding came (+1) or went (-1); without a holding, a phase began."""

    step: int
    phase: str
    holding: Holding | None
    sign: int


def replay(events: Iterable[Event]) -> tuple[Sample, ...]:
    """The state from the first phase on, after each event; with categories as known in the end."""
    held = dict.fromkeys(CATEGORIES, 0)
    samples: list[Sample] = []
    for event in events:
        if event.holding is not None:
            held[event.holding.category] += event.sign * event.holding.num_bytes
        if event.holding is None or samples:
            samples.append(Sample(event.step, event.phase, dict(held)))
    return tuple(samples)
