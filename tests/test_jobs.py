"""Jobs that really run: they end well, fail, hang, are interrupted, and lose their owner.

After each of them no process may be left. Programs put a mark into their environment, by which
`left_over` finds whatever descends from them, whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from labsupport.jobs import JobError, JobResult, JobTimeout, Metrics, torchrun
from labsupport.jobs.checks import steps_in
from labsupport.jobs.progress import RankLogs, parse_row
from labsupport.jobs.result import read_failures

Script = Callable[[str], str]
LIGHT = "import json, os, sys, time\nrank = int(os.environ['RANK'])\n"  # no torch: starts at once


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a rank's program; return its path."""

    def write(body: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(LIGHT + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A variable that every process of this test's jobs inherits."""
    value = f"mark-of-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("LAB_TEST_MARK", value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs go where pytest cleans up
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return value


def left_over(mark: str, *, within_s: float = 5.0) -> list[str]:
    """Command lines of living processes that carry the mark, once they had time to be reaped."""
    end = time.monotonic() + within_s
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get("LAB_TEST_MARK") == mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(3):
    total = torch.ones(2) * (rank + 1)
    dist.all_reduce(total)
    if rank == 0:
        row = {"step": step, "loss": float(total[0]) - step, "tokens_per_second": 100.0}
        print(json.dumps(row))
print("rank", rank, "threads", torch.get_num_threads(), sys.argv[1:], os.getcwd())
print("to stderr from", rank, file=sys.stderr)
if rank == 0:
    print(json.dumps({"done": True, "best": 1.0}))
dist.destroy_process_group()
"""


def test_a_job_that_ends_well(
    script: Script, mark: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTNAME", "nowhere.invalid")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHON_EXEC", "/no/such/python")  # N15: ranks run sys.executable
    result = torchrun(script(TRAIN), "--steps", 3, "--name", "a b")
    assert isinstance(result, JobResult)
    assert result.returncode == 0
    assert result.metrics.column("loss") == [3.0, 2.0, 1.0]
    assert result.metrics[1] == {"rank": 0, "step": 1, "loss": 2.0, "tokens_per_second": 100.0}
    assert result.summary == {"rank": 0, "done": True, "best": 1.0}
    assert sorted(result.log_paths) == [0, 1]
    assert "to stderr from 1" in result.log_paths[1].read_text()
    assert 0 < result.seconds < 60
    shown = capfd.readouterr()
    for rank in (0, 1):
        line = f"[rank {rank}] rank {rank} threads {result.threads_per_rank} "
        line += f"['--steps', '3', '--name', 'a b'] {os.getcwd()}"
        assert line in shown.out.splitlines()
    assert '"step"' not in shown.out  # rows feed the bar
    assert "3/3" in shown.err
    assert "loss=1" in shown.err
    assert "tokens/s=100" in shown.err
    assert not left_over(mark)


def test_two_jobs_at_once_get_ports_of_their_own(script: Script, mark: str) -> None:
    path = script("print('port', os.environ['MASTER_PORT'], os.environ['MASTER_ADDR'])\n")
    with socket.socket() as held:  # 29500, torchrun's habit, is taken
        with contextlib.suppress(OSError):
            held.bind(("127.0.0.1", 29500))
        results: list[JobResult] = []
        threads = [
            threading.Thread(target=lambda: results.append(torchrun(path))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ports = {result.log_paths[0].read_text() for result in results}
    assert len(ports) == 2
    assert all("127.0.0.1" in port for port in ports)
    assert not left_over(mark)


NAMESPACE = """
hostname seat7.example
echo "203.0.113.9 seat7.example" > "$1"
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


def in_foreign_hostname(folder: Path, *command: str) -> list[str]:
    """`command`, where the hostname resolves to an address of no interface of this machine."""
    hosts = str(folder / "hosts")
    return ["unshare", "--uts", "--mount", "sh", "-e", "-c", NAMESPACE, "sh", hosts, *command]


def test_hostname_that_resolves_elsewhere(script: Script, mark: str, tmp_path: Path) -> None:
    can = shutil.which("unshare") and subprocess.run(
        in_foreign_hostname(tmp_path, "true"), capture_output=True, check=False
    )
    if not can or can.returncode != 0:
        pytest.skip("needs root and unshare(1) for a hostname of its own")
    owner = [sys.executable, "-c", OWNER, script(TRAIN), "dict(deadline_s=60)"]
    done = subprocess.run(
        in_foreign_hostname(tmp_path, *owner), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 1] rank 1" in done.stdout
    assert not left_over(mark)


def test_a_module_runs_as_main(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "prog.py").write_text(
        "import __main__, json\n"
        "if __name__ == '__main__':\n"
        "    print(json.dumps({'step': 1, 'package': __package__, 'file': __main__.__file__}))\n"
    )
    monkeypatch.chdir(tmp_path)
    result = torchrun("pack.prog", nproc_per_node=1, env={"OMP_NUM_THREADS": "5"})
    assert result.threads_per_rank == 5
    assert result.metrics[0]["package"] == "pack"
    assert result.metrics[0]["file"].endswith("prog.py")


def test_the_first_failing_rank_is_named(script: Script, mark: str) -> None:
    """N9, in its nasty form: clean-up makes the other rank fail before the first one reports."""
    path = script(
        """
        import torch.distributed as dist
        def work():
            if rank == 1:
                raise ValueError("boom on one")
            dist.barrier()
        dist.init_process_group("gloo")
        try:
            work()
        finally:
            dist.destroy_process_group()
            time.sleep(3 * rank)  # torchrun stops it in the middle of its clean-up
        """
    )
    with pytest.raises(JobError) as caught:
        torchrun(path)
    error = caught.value
    assert error.rank == 1
    assert str(error).startswith("rank 1 failed: ValueError: boom on one")
    assert 'raise ValueError("boom on one")' in error.remote_traceback
    assert "runpy" not in error.remote_traceback
    assert list(error.others) == [0]
    assert "\n" not in error.others[0]
    assert error.returncode == 1
    assert "boom on one" in error.log_paths[1].read_text()
    assert "torchrun(" not in "".join(error._render_traceback_())
    assert not left_over(mark)


def test_a_killed_rank_is_named_with_its_signal(script: Script, mark: str) -> None:
    path = script(
        """
        import signal
        print("about to die", flush=True)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    with pytest.raises(JobError, match="rank 0 failed: killed by SIGKILL") as caught:
        torchrun(path)
    assert "about to die" in str(caught.value)
    assert caught.value.others == {1: "stopped by torchrun"}
    assert not left_over(mark)


def test_a_wrong_argument_of_the_program_shows_its_message(script: Script, mark: str) -> None:
    path = script(
        """
        import argparse
        argparse.ArgumentParser(prog="train").parse_args()
        """
    )
    with pytest.raises(JobError, match="SystemExit: 2") as caught:
        torchrun(path, "--no-such-option", nproc_per_node=1)
    assert "unrecognized arguments: --no-such-option" in str(caught.value)


def test_a_deadline_shows_where_each_rank_stands(script: Script, mark: str) -> None:
    path = script(
        """
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        def stuck_in_this_function():
            time.sleep(1000)
        stuck_in_this_function()
        """
    )
    with pytest.raises(JobTimeout, match="within 7 s") as caught:
        torchrun(path, deadline_s=7)
    assert sorted(caught.value.stacks) == [0, 1]
    assert "stuck_in_this_function" in caught.value.stacks[1].splitlines()[0]
    assert not left_over(mark)


OWNER = """
import sys
from labsupport.jobs import torchrun
try:
    torchrun(sys.argv[1], **eval(sys.argv[2]))
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt.__notes__[0])
"""

HANG = """
import signal, subprocess
import torch.distributed as dist
subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)      # as stubborn as a rank can be
dist.init_process_group("gloo")
print("ready", flush=True)
if rank == 0:
    dist.barrier()
time.sleep(1000)
"""


def start_owner(path: str, options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, path, options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_for_ready_ranks(owner: subprocess.Popen[str], num_ranks: int = 2) -> None:
    assert owner.stdout is not None
    for _ in range(num_ranks):
        assert "ready" in owner.stdout.readline()


def wait_for_launcher(mark: str) -> None:
    """Until the launcher has imported torch and sits in rendezvous."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for process in psutil.process_iter():
            try:
                if "labsupport.jobs.launcher" not in " ".join(process.cmdline()):
                    continue
                has_store = any(c.status == "LISTEN" for c in process.net_connections("tcp"))
                if process.environ().get("LAB_TEST_MARK") == mark and has_store:
                    return
            except psutil.Error:
                continue
        time.sleep(0.1)
    raise AssertionError("no launcher reached its rendezvous")


def test_interrupt_ends_stubborn_ranks(script: Script, mark: str) -> None:
    owner = start_owner(script(HANG), "{}")
    wait_for_ready_ranks(owner)
    start = time.monotonic()
    owner.send_signal(signal.SIGINT)
    stdout, _ = owner.communicate(timeout=15)
    assert time.monotonic() - start < 15
    assert "interrupted: the job was stopped; logs:" in stdout
    assert owner.returncode == 0
    assert not left_over(mark)


def test_interrupt_while_waiting_in_rendezvous(script: Script, mark: str) -> None:
    owner = start_owner(script(HANG), "dict(nnodes=2, rdzv_endpoint='127.0.0.1:0')")
    wait_for_launcher(mark)
    start = time.monotonic()
    owner.send_signal(signal.SIGINT)
    stdout, _ = owner.communicate(timeout=15)
    assert time.monotonic() - start < 15
    assert "interrupted:" in stdout
    assert not left_over(mark)


def test_a_killed_owner_leaves_nothing(script: Script, mark: str) -> None:
    owner = start_owner(script(HANG), "{}")
    wait_for_ready_ranks(owner)
    owner.kill()
    owner.wait()
    assert not left_over(mark, within_s=10)


def test_a_killed_launcher_leaves_nothing(script: Script, mark: str) -> None:
    owner = start_owner(script(HANG), "{}")
    wait_for_ready_ranks(owner)
    (launcher,) = psutil.Process(owner.pid).children()
    launcher.kill()
    owner.communicate(timeout=15)
    assert owner.returncode == 1  # a JobError that nobody caught
    assert not left_over(mark, within_s=10)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["labsupport.no_such"], {}, r"program='labsupport.no_such' is no module.*train' works"),
        (["no such"], {}, "must be a module name or the path"),
        (["/no/such/file.py"], {}, "is not a file"),
        (["json.tool"], {"nproc_per_node": 0}, r"nproc_per_node=0 must be a whole number.*2 works"),
        (["json.tool"], {"nproc_per_node": True}, "nproc_per_node=True"),
        (["json.tool"], {"nnodes": 2}, "needs rdzv_endpoint"),
        (["json.tool"], {"rdzv_endpoint": "here"}, "must be host:port"),
        (["json.tool"], {"deadline_s": 0}, "deadline_s=0 must be above 0"),
        (["json.tool"], {"threads": 0}, "must be a whole number >= 1"),
    ],
)
def test_bad_input_starts_nothing(
    arguments: list[str],
    options: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ValueError, match=message):
        torchrun(*arguments, **options)  # type: ignore[arg-type]


def test_lines_are_shown_whole(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    logs = RankLogs(tmp_path)
    log.write_text("first\nsec")
    assert logs.new_lines() == [(0, "first")]
    with log.open("a") as more:
        more.write("ond\n 10%\r 20%\r100%\n[Gloo] Rank 0 is connected to 1 peer ranks. x\nlast")
    assert logs.new_lines() == [(0, "second"), (0, "100%")]
    assert logs.new_lines() == []
    assert logs.rest() == [(0, "last")]


def test_only_rows_with_a_step_are_metrics() -> None:
    assert parse_row(1, '{"step": 3, "loss": NaN}')["step"] == 3  # type: ignore[index]
    assert parse_row(0, '{"rank": 7, "done": true}') == {"rank": 7, "done": True}
    for line in ('{"loss": 3}', '{"step": ', "{'step': 1}", "[1]", "step 3"):
        assert parse_row(0, line) is None


def test_steps_for_the_bar() -> None:
    assert steps_in(["--steps", 20]) == 20
    assert steps_in(["--seed", 1, "--steps=7"]) == 7
    assert steps_in([]) is None
    assert steps_in(["--steps"]) is None


def test_metrics_table() -> None:
    metrics = Metrics({"rank": 0, "step": i, "loss": 1 / 3, "note": "<b>"} for i in range(40))
    table = metrics._repr_html_()
    assert table.count("<tr>") == 1 + 12 + 1
    assert "0.333333" in table
    assert "<b>" not in table


def test_a_consequence_is_never_first(tmp_path: Path) -> None:
    """Even when its clock says that it came first."""
    reports = {
        0: (1.0, "RuntimeError: [pair.cc:537] Read error: Connection reset by peer"),
        1: (2.0, "ZeroDivisionError: division by zero"),
        2: (3.0, "RuntimeError: Connection closed by peer [127.0.0.1]:4711"),
    }
    for rank, (when, message) in reports.items():
        text = json.dumps({"time": when, "message": message, "traceback": "t"})
        (tmp_path / f"rank{rank}.error.json").write_text(text)
    stopped = {"3": {"exit_code": -15, "time": 0}, "1": {"exit_code": 1, "time": 0}}
    (tmp_path / "failures.json").write_text(json.dumps(stopped))
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 3, 0, 2]
