"""How many bytes does each rank send, how many do all send, and how many cross a slow link?

naive all-reduce   rank 0 sends (n - 1) S, every other rank S
ring all-reduce    every rank sends 2(n - 1)/n S: never more than 2 S, however many ranks
two nodes          a ring puts 2(n - 1)/n S on the cable for every time it crosses it;
                   reduce inside, exchange once, broadcast inside: S

naive_all_reduce_sent_bytes(size_bytes=1000, world_size=4)     # (3000, 1000, 1000, 1000)
ring_all_reduce_sent_bytes(size_bytes=1000, world_size=4)      # (1500, 1500, 1500, 1500)
ring_bytes_across(size_bytes=1000, node_of_ring=(0, 0, 1, 1))  # 1500.0 each way
"""

from __future__ import annotations

from collections.abc import Sequence


def naive_all_reduce_sent_bytes(*, size_bytes: int, world_size: int) -> tuple[int, ...]:
    """Bytes that each rank sends when rank 0 collects all buffers and sends the sum back."""
    _check(size_bytes, world_size)
    if world_size == 1:
        return (0,)
    return ((world_size - 1) * size_bytes, *[size_bytes] * (world_size - 1))


def ring_all_reduce_sent_bytes(*, size_bytes: int, world_size: int) -> tuple[int, ...]:
    """Bytes that each rank sends in a ring all-reduce of n equal chunks: 2(n - 1) chunks.

    Raises ValueError where the buffer does not split into equal chunks.
    """
    chunk = _chunk_bytes(size_bytes, world_size)
    return (2 * (world_size - 1) * chunk,) * world_size


def all_to_all_sent_bytes(*, size_bytes: int, world_size: int) -> tuple[int, ...]:
    """Bytes that each rank sends to others in an all-to-all: n - 1 of its n chunks."""
    chunk = _chunk_bytes(size_bytes, world_size)
    return ((world_size - 1) * chunk,) * world_size


def ring_bytes_across(*, size_bytes: float, node_of_ring: Sequence[int]) -> float:
    """Bytes on a cable between two nodes, in each direction, for one ring all-reduce.

    `node_of_ring[i]` is the node of the i-th rank of the ring. The ring closes, so it crosses the
    cable equally often both ways, and each crossing carries 2(n - 1)/n S.
    """
    if len(node_of_ring) < 2 or set(node_of_ring) - {0, 1}:
        raise ValueError(f"{node_of_ring=} must name node 0 or 1 of each rank; (0, 0, 1, 1) works")
    world_size = len(node_of_ring)
    forward = sum(
        node_of_ring[i] == 0 and node_of_ring[(i + 1) % world_size] == 1 for i in range(world_size)
    )
    return forward * 2 * (world_size - 1) / world_size * size_bytes


def hierarchical_bytes_across(*, size_bytes: float) -> float:
    """Bytes on the cable between two nodes, each direction, when one rank a node exchanges sums."""
    if size_bytes < 0:
        raise ValueError(f"{size_bytes=} must be at least 0; 2**20 works")
    return size_bytes


def _chunk_bytes(size_bytes: int, world_size: int) -> int:
    _check(size_bytes, world_size)
    if size_bytes % world_size:
        works = size_bytes + world_size - size_bytes % world_size
        raise ValueError(
            f"{size_bytes=} must split into {world_size=} equal chunks; {works} bytes work"
        )
    return size_bytes // world_size


def _check(size_bytes: int, world_size: int) -> None:
    if size_bytes < 0 or world_size < 1:
        raise ValueError(
            f"{size_bytes=} must be at least 0 and {world_size=} at least 1; "
            "size_bytes=4096 and world_size=4 work"
        )
