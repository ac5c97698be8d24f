"""Cutting this process's connections to other ranks, so that a vain wait in C++ code ends.

    cut_connections(spare_port=29400)       # the store's connections stay, on both of their ends

gloo waits for a message where no signal can interrupt it. When its connection is gone, the wait
fails at once, and the rank's Python code goes on with an exception.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def cut_connections(*, spare_port: int) -> None:
    """Shut down every TCP connection of this process that has not `spare_port` at either end."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or listening
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = connection.getsockname()[1], connection.getpeername()[1]
                if spare_port not in ends:
                    connection.shutdown(socket.SHUT_RDWR)
