"""The rank's side: a Jupyter kernel with rank variables, a watch on its owner, and a way out.

    serve(RankSpec(...))      # in the rank's own process; returns when the kernel has ended

Standard input is the owner's line. `unblock` cuts the connections to the other ranks, so that a
collective that waits in vain fails; end of file means that the owner is gone, and ends the rank.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import warnings

import torch
import torch.distributed as dist
from ipykernel.kernelapp import IPKernelApp

from labsupport.ranks.board import Board
from labsupport.ranks.inner import Inner
from labsupport.ranks.sockets import cut_connections
from labsupport.ranks.spec import RankSpec


def serve(spec: RankSpec) -> None:
    """Be rank `spec.rank` until the owner says stop or goes away."""
    owner_line = _take_over_streams(spec)
    os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(spec.cwd)
    sys.path[:] = spec.python_path
    # A forked rank would otherwise draw the same "random" numbers as its siblings.
    random.seed()
    warnings.filterwarnings("ignore", message="To exit: use")  # of IPython, for sys.exit()
    torch.set_num_threads(spec.threads)
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(spec.device)
    stacks = spec.stack_file.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    faulthandler.enable(file=stacks, all_threads=False)
    board = Board(spec.board_file, rank=spec.rank, world_size=spec.world_size)
    inner = Inner(spec.rank, spec.world_size, spec.backend, spec.device, board)
    inner.collective_timeout_s = spec.collective_timeout_s
    threading.Thread(target=_follow_owner, args=(owner_line, inner), daemon=True).start()
    app = IPKernelApp.instance(
        connection_file=str(spec.connection_file),
        user_ns={
            "rank": spec.rank,
            "world_size": spec.world_size,
            "device": torch.device(spec.device),
            "torch": torch,
            "dist": dist,
            "__lab__": inner,
        },
        # The owner reads the log file, which keeps a dying rank's last words.
        capture_fd_output=False,
    )
    app.initialize(
        [
            "--HistoryManager.enabled=False",
            "--InteractiveShellApp.exec_PYTHONSTARTUP=False",
            "--log-level=CRITICAL",
        ]
    )
    sys.stdout.flush_interval = sys.stderr.flush_interval = 0.05  # type: ignore[union-attr]
    inner.attach(app.shell)
    app.start()


def _take_over_streams(spec: RankSpec) -> int:
    """Give fds 1 and 2 to the log file, and stdin, under the number returned, to the watch."""
    owner_line = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    log = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return owner_line


def _follow_owner(line: int, inner: Inner) -> None:
    with os.fdopen(line, "rb", buffering=0) as commands:
        while command := commands.readline():
            if command.strip() == b"unblock":
                cut_connections(spare_port=inner.port)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with whatever this rank has started
