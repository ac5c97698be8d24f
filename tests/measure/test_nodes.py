"""Two nodes in namespaces. Where the machine does not allow them, the skip says why in one line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from labsupport.measure import nodes
from labsupport.measure.bench import bench_collectives
from labsupport.measure.links import compare_routes, sent_through
from labsupport.measure.nodes import NodeError, TwoNodes, can_make_nodes, two_nodes
from labsupport.plan.communication import fit_latency_bandwidth

REASON = can_make_nodes()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def still_there(pids: list[int], within_s: float = 10.0) -> list[int]:
    """Those of `pids` that still run when the time is up."""
    end = time.monotonic() + within_s
    while True:
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        left = [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    before = set(children())
    yield
    assert still_there([pid for pid in children() if pid not in before]) == []


def test_reasons_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.sys, "platform", "darwin")
    assert can_make_nodes() == "network namespaces need Linux; this is darwin"
    monkeypatch.setattr(nodes.sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in str(can_make_nodes())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert can_make_nodes() == "the command tc is not installed (package iproute2)"


def test_a_kernel_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(nodes, "_first_line", lambda child: "")
    assert "CAP_SYS_ADMIN" in str(can_make_nodes())


@pytest.mark.parametrize("wrong", [{"processes_per_node": 0}, {"rate_bits_per_s": 5}])
def test_bad_numbers_start_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"1 and 10\*\*9 work"), two_nodes(**wrong):
        pass


@needs_nodes
@pytest.mark.slow
def test_the_link_runs_at_one_gigabit(no_leftovers: None) -> None:
    with two_nodes() as pair:
        assert pair.bandwidth_bytes_per_s == 125e6
        table = bench_collectives(pair, min_bytes=2**12, max_bytes=2**24, step_factor=16)
    assert 0.10e9 < table.rows[-1].bus_bandwidth_bytes_per_s < 0.126e9
    fit = fit_latency_bandwidth(table.rows, world_size=2)
    assert 0.09e9 < fit.bandwidth_bytes_per_s < 0.14e9


@needs_nodes
@pytest.mark.slow
def test_hierarchy_saves_bytes_on_the_cable(no_leftovers: None) -> None:
    with two_nodes(processes_per_node=2) as pair:
        table = compare_routes(pair, size_bytes=2**21)
        with pytest.raises(ValueError, match="4194304 works"):
            compare_routes(pair, size_bytes=2**21 + 4)
    crossing, beside, hierarchy, _ = table.rows
    # The formulas' bytes, and up to 4% of headers and acknowledgements.
    assert 3.0 <= crossing.cable_over_size < 3.12
    assert 1.5 <= beside.cable_over_size < 1.56
    assert 1.0 <= hierarchy.cable_over_size < 1.04
    assert hierarchy.time_s < crossing.time_s
    assert "real 1 Gb/s" in table._repr_html_()
    assert "hierarchy" in repr(table)
    assert '"cable_bytes"' in table.to_json()


def test_routes_need_an_inside() -> None:
    alone = TwoNodes(processes_per_node=1, rate_bits_per_s=10**9, holders=(1, 1))
    with pytest.raises(ValueError, match="processes_per_node=2 works"):
        compare_routes(alone)


def test_an_unknown_interface() -> None:
    with pytest.raises(ValueError, match="lo is"):
        sent_through("no-such-interface")


@needs_nodes
def test_a_failing_rank_is_named_and_a_late_one_stopped(no_leftovers: None) -> None:
    def fails_on_1() -> None:
        if dist.get_rank() == 1:
            raise KeyError("on purpose")
        dist.barrier()

    with two_nodes() as pair:
        assert pair.run(lambda a, b: (dist.get_rank(), a + b), 1, b=2) == [(0, 3), (1, 3)]
        with pytest.raises(NodeError, match=r"rank 1 failed[\s\S]*KeyError: 'on purpose'"):
            pair.run(fails_on_1)
        with pytest.raises(NodeError, match=r"ranks \[0, 1\] did not finish within 0\.5 s"):
            pair.run(lambda: time.sleep(60), deadline_s=0.5)


@needs_nodes
def test_the_wrong_interface_says_so(no_leftovers: None) -> None:
    with (
        two_nodes(env={"GLOO_SOCKET_IFNAME": "lo"}) as pair,
        pytest.raises(NodeError, match=r"127\.0\.0\.1"),
    ):
        pair.run(lambda: dist.all_reduce(torch.ones(1)), collective_timeout_s=5.0, deadline_s=40.0)


OWNER = """
import time
from labsupport.measure.nodes import two_nodes
with two_nodes() as pair:
    print("up", flush=True)
    pair.run(lambda: time.sleep(100))
"""


@needs_nodes
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_when_the_owner_is_interrupted_or_killed(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        below = _grown(owner.pid, 4)  # two holders and two ranks
        owner.send_signal(how)
        owner.wait(timeout=10)
        assert still_there(below) == []
    finally:
        owner.kill()
        owner.wait(timeout=10)
        if owner.stdout is not None:
            owner.stdout.close()


def _grown(pid: int, count: int) -> list[int]:
    """The descendants of a process once there are `count` of them."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        below = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        if len(below) >= count:
            return below
        time.sleep(0.02)
    raise AssertionError(f"{pid} has not started {count} processes")
