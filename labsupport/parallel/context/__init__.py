"""Context parallelism: a sequence longer than one rank holds.

zigzag.py  which tokens a rank takes      by_hand.py  context_parallel(model, mesh)
ring.py    attention round the ring       native.py   torch's own, on GPUs
"""

from labsupport.parallel.context.by_hand import context_parallel
from labsupport.parallel.context.ring import ring_attention
from labsupport.parallel.context.zigzag import (
    contiguous_chunks,
    shard_sequence,
    unshard_sequence,
    zigzag_chunks,
    zigzag_positions,
)

__all__ = [
    "context_parallel",
    "contiguous_chunks",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
    "zigzag_chunks",
    "zigzag_positions",
]
