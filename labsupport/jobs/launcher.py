"""torchrun, held on a lifeline, with its verdict on failed ranks written down.

    python -m labsupport.jobs.launcher LOG_DIR TORCHRUN_ARGUMENTS...

Runs `torch.distributed.run` in this process. Exit codes that torchrun saw go to
LOG_DIR/failures.json: {global rank: {"exit_code": -9, "time": seconds since the epoch}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from labsupport.jobs.lifeline import watch_owner


def main(log_dir: Path, torchrun_args: list[str]) -> int:
    """Run torchrun; return 0 when every rank ended well, 1 when one failed."""
    watch_owner(0)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun_main

    try:
        torchrun_main(torchrun_args)
    except ChildFailedError as error:
        verdict = {
            rank: {"exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        }
        (log_dir / "failures.json").write_text(json.dumps(verdict))
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
