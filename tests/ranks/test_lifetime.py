"""Ranks and a real notebook kernel: interrupt, restart, kill, two kernels at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.ranks.conftest import descendants, still_there


class Notebook:
    """A kernel as JupyterLab starts it, with its cells run one by one."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def send(self, code: str) -> str:
        return str(self.client.execute(code))

    def finish(self, message_id: str, timeout_s: float = 60) -> tuple[str, dict[str, Any] | None]:
        """Text shown by the cell, and its error if it had one."""
        text, error = "", None
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "execute_result":
                text += content["data"]["text/plain"] + "\n"
            elif message["msg_type"] == "error":
                error = content
            elif content.get("execution_state") == "idle":
                return text, error

    def run(self, code: str) -> str:
        text, error = self.finish(self.send(code))
        assert error is None, "\n".join(error["traceback"])
        return text

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    book = Notebook()
    yield book
    book.close()


START = "%load_ext labsupport\nfrom labsupport import Ranks\nranks = Ranks(2)\nranks"


def test_an_interrupt_shows_the_stacks_and_the_next_cell_works(notebook: Notebook) -> None:
    assert "2 ranks on cpu (gloo)" in notebook.run(START)
    for cell in (
        "%%ranks\nimport time\nkept = 'still here'\nwhile True: time.sleep(0.1)",
        "%%ranks\ndist.recv(torch.empty(1), 1 - rank)  # no signal reaches this wait",
        "ranks.run(lambda: __import__('time').sleep(100))",
    ):
        message_id = notebook.send(cell)
        time.sleep(1.5)
        started = time.monotonic()
        notebook.manager.interrupt_kernel()
        _, error = notebook.finish(message_id)
        assert time.monotonic() - started < 10
        assert error is not None
        shown = "\n".join(error["traceback"])
        assert "KeyboardInterrupt" in shown
        assert "rank 0 stood at:" in shown
        assert "rank 1 stood at:" in shown
        assert "sleep" in shown or "recv" in shown
        assert "[0] still here" in notebook.run("%%ranks\ndist.barrier()\nprint(kept)")


def test_the_magic(notebook: Notebook) -> None:
    notebook.run("%load_ext labsupport")
    shown = notebook.run("%%ranks\nprint(rank, world_size, device, torch.__name__)")
    assert shown.splitlines()[0].startswith("[started 2 ranks on cpu (gloo)")
    assert shown.splitlines()[1:] == ["[0] 0 2 cpu torch", "[1] 1 2 cpu torch"]
    assert notebook.run("%%ranks -r 1\nrank").splitlines() == ["[1] 1"]
    for wrong, told in [
        ("-r 5", "choose from 0 to 1"),
        ("-r x", "-r 0,2 or -r 0-3 works"),
        ("--deadline 0", "above 0"),
    ]:
        shown = notebook.run(f"%%ranks {wrong}\nrank")
        assert shown.startswith("UsageError: ")
        assert told in shown
    _, error = notebook.finish(notebook.send("%%ranks --deadline 1\nimport time; time.sleep(60)"))
    assert error is not None
    assert error["ename"] == "RankTimeout"


def test_an_error_in_the_notebook_is_the_ranks_own(notebook: Notebook) -> None:
    notebook.run(START)
    notebook.run("def step(x):\n    return 1 / x")
    _, error = notebook.finish(notebook.send("ranks.run(step, 0)"))
    assert error is not None
    shown = "\n".join(error["traceback"])
    assert "cell, line 2, in step\n    return 1 / x" in shown
    assert "pool.py" not in shown


def test_a_function_of_a_cell_and_cuda_used_before(notebook: Notebook) -> None:
    """The notebook's process may do what it likes first: no rank is forked from it."""
    notebook.run("import torch, threading\nscale = 3\ntorch.ones(2) @ torch.ones(2)")
    notebook.run("threading.Thread(target=threading.Event().wait, daemon=True).start()")
    notebook.run(START)
    assert notebook.run("ranks.run(lambda x: x * scale + rank, 2)") == "[6, 7]\n"


@pytest.mark.parametrize("how", ["kill -9", "restart", "shutdown", "exit"])
def test_no_process_outlives_the_kernel(notebook: Notebook, how: str) -> None:
    notebook.run(START)
    notebook.run("folder = str(ranks._held.crew.folder)")
    folder = notebook.run("print(folder)").strip()
    busy = "%%ranks\nimport subprocess; subprocess.Popen(['sleep', '1000'])\n"
    notebook.run(busy)
    waiting = notebook.send("%%ranks\ndist.recv(torch.empty(1), 1 - rank)")
    time.sleep(0.5)
    pids = descendants(notebook.pid)
    assert len(pids) >= 5  # two ranks, a sleeper each, and the template
    kernel = notebook.pid
    if how == "kill -9":
        os.kill(kernel, signal.SIGKILL)
    elif how == "restart":
        notebook.manager.restart_kernel(now=True)
    elif how == "shutdown":
        notebook.manager.shutdown_kernel()
    else:
        notebook.manager.interrupt_kernel()
        notebook.finish(waiting)
        notebook.send("quit()")
    assert not still_there(pids)
    assert not os.path.exists(folder)


def test_two_kernels_at_once(notebook: Notebook) -> None:
    other = Notebook()
    try:
        for book in (notebook, other):
            book.run(START)
        for book in (notebook, other, notebook):
            assert book.run("%%ranks\ndist.barrier(); rank") == "[0] 0\n[1] 1\n"
    finally:
        other.close()


def test_the_same_cell_three_times(notebook: Notebook) -> None:
    for _ in range(3):
        notebook.run("from labsupport import Ranks\nranks = Ranks(2)\nranks.run(lambda: rank);")
    # Two ranks and their template are left; the pools before this one have ended.
    deadline = time.monotonic() + 10
    while len(descendants(notebook.pid)) > 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [psutil.Process(pid).name() for pid in descendants(notebook.pid)]
    assert len(names) == 3, names
