from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from labsupport import Ranks

GONE_WITHIN_S = 10.0


def still_there(pids: list[int], within_s: float = GONE_WITHIN_S) -> list[int]:
    """Those of `pids` that are still running when the time is up."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        left = [pid for pid in pids if _runs(pid)]
        if not left:
            return []
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks that the tests of a module share: every test leaves them usable."""
    with Ranks(2, collective_timeout_s=4) as ranks:
        yield ranks


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What has been shown since the last call, line by line."""
    return lambda: capsys.readouterr().out.splitlines()
