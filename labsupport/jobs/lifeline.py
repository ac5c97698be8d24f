"""How does every process of a job end when the process that asked for it is gone?

    owner (notebook) --pipe--> launcher (torchrun) --same pipe--> workers (one a rank)

Only the owner holds the writing end. When the owner closes it, or dies in any way, each reader sees
the end of file and kills its own process group. A child that the owner forked may hold the pipe
open for longer; so each reader also ends when it has lost its parent.

    watch_owner(0)          # in the launcher: file descriptor 0 is the reading end
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

LOOK_EVERY_S = 0.5


def watch_owner(descriptor: int) -> None:
    """Start a daemon thread that kills this process group when `descriptor` reaches its end."""
    threading.Thread(target=_wait_and_kill, args=(descriptor,), daemon=True, name="owner").start()


def detach_stdin() -> int:
    """Move the lifeline off file descriptor 0, where /dev/null takes its place; return its new fd.

    The new descriptor is not inherited, so what this process starts cannot hold or read it.
    """
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


def _wait_and_kill(descriptor: int) -> None:
    parent = os.getppid()
    with contextlib.suppress(OSError, ValueError):  # a closed descriptor says the same as its end
        while os.getppid() == parent:
            readable, _, _ = select.select([descriptor], [], [], LOOK_EVERY_S)
            if readable and not os.read(descriptor, 1):
                break
    os.killpg(os.getpgrp(), signal.SIGKILL)
