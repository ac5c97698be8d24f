"""`python -m labsupport.train`, alone or under torchrun: train, and say how it went.

    python -m labsupport.train --model tiny --steps 20
    torchrun --nproc-per-node 2 -m labsupport.train --data-parallel-sharding fsdp --json

Exit codes: 0 done; 2 the request is wrong, told in one line by rank 0; 1 it failed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from labsupport.train.request import in_options, read_request

WAIT_TO_BE_STOPPED_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """One run; returns the exit code."""
    rank, world_size = (
        int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    num_nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    refusal = None
    try:
        request = read_request(argv, world_size=world_size, num_nodes=num_nodes)
        from labsupport.train.folders import check_apart, check_writable, folders_of

        check_apart(request)
        check_writable(*folders_of(request))
        from labsupport.train.prepare import prepare

        prepared = prepare(request, rank=rank)
    except ValueError as error:
        refusal = in_options(" ".join(str(error).split()))
    except KeyboardInterrupt:
        return fail("interrupted", rank=rank, world_size=world_size, code=130)
    if refusal is not None:
        return refuse(refusal, rank=rank)
    from labsupport.train.loop import TrainingDivergedError
    from labsupport.train.run import run

    try:
        run(prepared)
    except (TrainingDivergedError, OSError) as error:
        return fail(f"{type(error).__name__}: {error}", rank=rank, world_size=world_size)
    except KeyboardInterrupt:
        return fail("interrupted", rank=rank, world_size=world_size, code=130)
    return 0


def refuse(message: str, *, rank: int) -> int:
    """The request is wrong, and all ranks know. Rank 0 says so; its end makes torchrun stop us."""
    if rank == 0:
        print(f"labsupport.train: {message}", file=sys.stderr)
    else:
        time.sleep(WAIT_TO_BE_STOPPED_S)
    return 2


def fail(message: str, *, rank: int, world_size: int, code: int = 1) -> int:
    """It failed on this rank; each rank says so, for its log may be the only one at hand."""
    who = f"rank {rank}: " if world_size > 1 else ""
    print(f"labsupport.train: {who}{message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
