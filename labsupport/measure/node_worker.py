"""One rank inside one node: reads its work, joins the group, leaves its result as a file.

    python -m labsupport.measure.node_worker FOLDER     # by measure.nodes, which sets RANK etc.

FOLDER/work.pkl is read; result<rank>.pkl or error<rank>.txt is written, whole or not at all.
What the rank prints goes to log<rank>.txt. The rank ends when its stdin does: its owner is gone.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path


def main(folder: Path) -> None:
    """Run the function of work.pkl on this rank."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    rank = os.environ["RANK"]
    log = os.open(folder / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = _work(folder)
    except BaseException:
        # Written before the connections close, so that this error is older than those of the
        # ranks which lose them.
        _write_whole(folder / f"error{rank}.txt", traceback.format_exc().encode())
        sys.exit(1)
    _write_whole(folder / f"result{rank}.pkl", result)


def _work(folder: Path) -> bytes:
    """The pickled result of this rank."""
    import cloudpickle
    import torch.distributed as dist

    fn, args, kwargs, timeout_s = pickle.loads((folder / "work.pkl").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    result: bytes = cloudpickle.dumps(fn(*args, **kwargs))
    dist.barrier()  # a rank that leaves early would break the others' connections
    dist.destroy_process_group()
    return result


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


def _end_with_owner() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
