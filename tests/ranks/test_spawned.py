"""Plain processes, the way where forking is not safe, keep the same promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from labsupport import RankDied, RankError, Ranks, RankTimeout
from labsupport.ranks import launch
from tests.ranks.conftest import still_there

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spawned() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "choose_launcher", launch.SpawnLauncher)
        with Ranks(2) as ranks:
            yield ranks


def test_macos_takes_plain_processes(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(launch.choose_launcher(), launch.SpawnLauncher)


def test_they_work_fail_and_work_again(spawned: Ranks, lines) -> None:
    spawned.execute("dist.barrier(); print(rank)")
    assert lines() == ["[0] 0", "[1] 1"]
    with pytest.raises(RankTimeout, match="rank 1 did not come"):
        spawned.execute("if rank == 0: dist.barrier()")
    with pytest.raises(RankError, match="rank 1 failed: ValueError"):
        spawned.execute("if rank == 1: raise ValueError\ndist.barrier()")
    with pytest.raises(RankTimeout, match="deadline"):
        spawned.execute("import time; time.sleep(60)", deadline_s=0.5)
    with pytest.raises(RankDied, match="SIGKILL"):
        spawned.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    assert spawned.run(lambda: 1) == [1, 1]


def test_they_end_with_their_owner() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from labsupport import Ranks\nfrom labsupport.ranks import launch\n"
            "launch.choose_launcher = launch.SpawnLauncher\n"
            "ranks = Ranks(2); print(*ranks.pids, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    time.sleep(0.2)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert len(pids) == 2
    assert not still_there(pids)
