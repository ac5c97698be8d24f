"""The notebook's end of one rank: Jupyter's messages over ipc sockets.

    channel = Channel(context, folder, rank=0)
    message_id = channel.execute("1 + 1")
    channel.replies(); channel.published()        # what has arrived, without waiting

`jupyter_client.Session` makes and checks the messages; nothing here waits but `wait_until_ready`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session

Message = dict[str, Any]


class Channel:
    """Sockets to one rank's kernel. Made before the kernel starts: it writes the file it reads."""

    def __init__(self, context: zmq.Context[Any], connection_file: Path) -> None:
        key = secrets.token_bytes(32).hex()
        self._session = Session(key=key.encode(), username="lab")
        address = str(connection_file.with_suffix(""))
        names = ("shell", "iopub", "stdin", "control", "hb")
        ports = {f"{name}_port": number for number, name in enumerate(names, 1)}
        connection = {"transport": "ipc", "ip": address, "key": key, **ports}
        connection["signature_scheme"] = "hmac-sha256"
        connection_file.touch(mode=0o600)
        connection_file.write_text(json.dumps(connection))
        self.shell = self._connect(context, zmq.DEALER, f"ipc://{address}-{ports['shell_port']}")
        self.iopub = self._connect(context, zmq.SUB, f"ipc://{address}-{ports['iopub_port']}")
        self.iopub.setsockopt(zmq.SUBSCRIBE, b"")

    def execute(self, code: str, *, silent: bool = False) -> str:
        """Send code; the id by which its replies and output are known."""
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        message = self._session.send(self.shell, "execute_request", content)
        return str(message["header"]["msg_id"])

    def replies(self) -> Iterator[Message]:
        return self._receive(self.shell)

    def published(self) -> Iterator[Message]:
        return self._receive(self.iopub)

    def wait_until_ready(self, *, deadline_s: float, still_alive: Callable[[], bool]) -> bool:
        """Until the kernel answers and its output arrives here; False if it ends before."""
        answered = False
        while time.monotonic() < deadline_s and still_alive():
            self._session.send(self.shell, "kernel_info_request", {})
            self.shell.poll(1000 if not answered else 50)
            answered = answered or any(True for _ in self.replies())
            # Output that was published before the subscription took hold is lost, so ask again.
            if answered and self.iopub.poll(200) and any(True for _ in self.published()):
                self._settle()
                return True
        return False

    def close(self) -> None:
        self.shell.close(linger=0)
        self.iopub.close(linger=0)

    def _settle(self) -> None:
        """Take in what earlier questions still bring, up to a last one."""
        last = self._session.send(self.shell, "kernel_info_request", {})["header"]["msg_id"]
        while self.iopub.poll(1000):
            for message in self.published():
                over = message["content"].get("execution_state") == "idle"
                if over and message["parent_header"].get("msg_id") == last:
                    list(self.replies())
                    return

    def _receive(self, socket: zmq.Socket[Any]) -> Iterator[Message]:
        while True:
            try:
                _, message = self._session.recv(socket, mode=zmq.NOBLOCK)
            except ValueError:  # a message whose signature is wrong is nobody's
                continue
            if message is None:
                return
            yield message

    @staticmethod
    def _connect(context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[Any]:
        path = address.removeprefix("ipc://")
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(
                f"the path {path!r} is too long for a socket; set TMPDIR to a shorter one, as /tmp"
            )
        socket: zmq.Socket[Any] = context.socket(kind)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RCVHWM, 0)  # lose nothing that is printed between two cells
        socket.connect(address)
        return socket
