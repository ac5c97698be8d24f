"""Persistent ranks: N processes that a notebook talks to, each one a Jupyter kernel.

    with Ranks(2) as ranks:
        ranks.run(lambda: torch.distributed.get_rank())     # [0, 1]
        ranks.execute("print(rank, world_size, device)")    # [0] 0 2 cpu ...

    notebook ──commands──> template ──fork──> rank 0, rank 1, …     (labsupport.ranks.launch)
        └────── zmq over ipc: code in, output and results out ──────┘

The template has imported torch once, so a rank starts in tens of milliseconds. A rank lives until
`close()`, or until the notebook's process ends, however it ends.
"""

from labsupport.ranks.errors import CollectiveMismatch, RankDied, RankError, RankTimeout
from labsupport.ranks.pool import Ranks

__all__ = ["CollectiveMismatch", "RankDied", "RankError", "RankTimeout", "Ranks"]
