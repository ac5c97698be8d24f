"""What does every rank hold after k steps of a ring all-reduce, and what does it send next?

n ranks, n chunks.  Steps 0 .. n-2 sum (reduce-scatter), steps n-1 .. 2n-3 share (all-gather).
At step k rank r sends chunk (r - k) mod n to rank r + 1.

state = ring_all_reduce_state(world_size=4, steps_done=1)
state.holds[1][0]      # frozenset({0, 1}): rank 1's chunk 0 is the sum of ranks 0 and 1
state.sends[1]         # 0: that chunk goes to rank 2 next
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RingState:
    """One moment of a ring all-reduce."""

    world_size: int
    steps_done: int
    holds: tuple[tuple[frozenset[int], ...], ...]
    """holds[rank][chunk]: the ranks whose numbers are summed there."""
    sends: tuple[int, ...]
    """sends[rank]: the chunk that goes to the next rank in the coming step; empty at the end."""

    @property
    def num_steps(self) -> int:
        """2(n - 1)."""
        return 2 * (self.world_size - 1)

    @property
    def is_summing(self) -> bool:
        """Whether the coming step adds (reduce-scatter); later ones overwrite (all-gather)."""
        return self.steps_done < self.world_size - 1

    @property
    def sent_share(self) -> float:
        """What each rank has sent so far, in buffers: steps_done / n. At the end 2(n - 1)/n."""
        return self.steps_done / self.world_size


def ring_all_reduce_state(*, world_size: int, steps_done: int) -> RingState:
    """The state after `steps_done` of 2(n - 1) steps, by playing them.

    Raises ValueError for fewer than 2 ranks or a step that does not exist.
    """
    if world_size < 2:
        raise ValueError(f"{world_size=} makes no ring; 4 works")
    last = 2 * (world_size - 1)
    if not 0 <= steps_done <= last:
        raise ValueError(f"{steps_done=} must lie between 0 and 2(n - 1) = {last}; {last} works")
    holds = [[frozenset({rank}) for _ in range(world_size)] for rank in range(world_size)]
    for step in range(steps_done):
        sends = _sends(world_size, step)
        messages = [holds[rank][chunk] for rank, chunk in enumerate(sends)]
        for rank, chunk in enumerate(sends):
            to = (rank + 1) % world_size
            adds = step < world_size - 1
            holds[to][chunk] = holds[to][chunk] | messages[rank] if adds else messages[rank]
    return RingState(
        world_size=world_size,
        steps_done=steps_done,
        holds=tuple(tuple(row) for row in holds),
        sends=_sends(world_size, steps_done) if steps_done < last else (),
    )


def _sends(world_size: int, step: int) -> tuple[int, ...]:
    """The chunk that each rank sends at a step: (r - k) mod n."""
    return tuple((rank - step) % world_size for rank in range(world_size))
