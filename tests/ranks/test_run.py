"""`run` and `execute`: functions and cells reach every rank, results come back, state stays."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from labsupport import RankError, Ranks, devices
from labsupport.ranks import launch
from labsupport.ranks.pool import latest_pool
from tests.ranks.conftest import descendants, still_there

FACTOR = 7


def by_reference(x: int) -> int:
    import torch.distributed as dist

    return x * FACTOR + dist.get_rank()


def test_a_module_function_its_arguments_and_keywords(two: Ranks) -> None:
    assert two.run(by_reference, 1) == [7, 8]
    assert two.run(by_reference, x=2) == [14, 15]


def test_closures_lambdas_and_partials_carry_their_variables(two: Ranks) -> None:
    offset = 10

    def add(x: int) -> int:
        return x + offset

    assert two.run(add, 1) == [11, 11]
    assert two.run(lambda: offset * FACTOR) == [70, 70]
    assert two.run(functools.partial(add, 5)) == [15, 15]


def run_as_script(source: str, *, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (env or {}),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_functions_of_main_see_what_the_ranks_define() -> None:
    shown = run_as_script(
        "from labsupport import Ranks\n"
        "with Ranks(2) as ranks:\n"
        "    ranks.execute('shift = 100 * rank')\n"
        "    own = 5\n"
        "    print(ranks.run(lambda: (rank, world_size, str(device), shift + own)))\n"
    )
    assert shown == "[(0, 2, 'cpu', 5), (1, 2, 'cpu', 105)]"


def test_tensors_come_back_as_plain_cpu_tensors(two: Ranks) -> None:
    def work() -> object:
        import torch

        weight = torch.ones(3, requires_grad=True)
        return {"loss": (weight * 2).sum(), "weight": weight}

    for result in two.run(work):
        assert result["loss"].item() == 6.0
        assert not result["loss"].requires_grad
        assert result["weight"].requires_grad


def test_state_stays_between_cells_and_goes_with_a_restart(two: Ranks) -> None:
    two.execute("kept = rank + 40")
    two.execute("kept += 2")
    two.execute("assert kept == 42 + rank")
    before = two.pids
    two.restart()
    assert not set(before) & set(two.pids)
    with pytest.raises(RankError, match="NameError"):
        two.execute("kept")


def test_some_ranks_only(two: Ranks, lines) -> None:
    two.execute("print('here')", ranks=[1])
    assert lines() == ["[1] here"]
    with pytest.raises(ValueError, match=r"ranks=\[2\].*choose from 0 to 1"):
        two.execute("1", ranks=[0, 2])
    with pytest.raises(ValueError, match="choose from"):
        two.execute("1", ranks=[])


def test_rank_variables_and_the_process_group(two: Ranks) -> None:
    def variables() -> list[str]:
        import os

        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]
        return [os.environ[name] for name in names]

    assert two.run(variables) == [["0", "2", "0", "127.0.0.1"], ["1", "2", "1", "127.0.0.1"]]
    assert (two.backend, two.device, two.world_size) == ("gloo", "cpu", 2)


def test_a_second_initialisation_is_harmless(two: Ranks) -> None:
    two.execute("dist.init_process_group('gloo')")
    two.execute("dist.init_process_group('gloo'); dist.barrier()")
    two.execute("dist.destroy_process_group(); dist.init_process_group(); dist.barrier()")
    two.execute("from torch.distributed import all_reduce; all_reduce(torch.ones(1))")


def test_ranks_run_this_interpreter(two: Ranks) -> None:
    two.execute(f"import sys; assert sys.executable == {sys.executable!r}")


def test_threads_fit_the_allowed_cpus_and_are_shown(two: Ranks) -> None:
    threads = two.run(lambda: __import__("torch").get_num_threads())
    assert threads == [two.threads_per_rank] * 2
    assert 2 * two.threads_per_rank <= max(2, devices.allowed_cpus())
    assert f"{two.threads_per_rank} thread" in repr(two)


def test_a_users_thread_setting_is_kept() -> None:
    source = (
        "from labsupport import Ranks\n"
        "with Ranks(2) as ranks: print(ranks.run(lambda: torch.get_num_threads()))"
    )
    assert run_as_script(source, env={"OMP_NUM_THREADS": "3"}) == "[3, 3]"
    with Ranks(1, threads_per_rank=2, env={"LAB_NOTE": "hello"}) as one:
        one.execute("import os; assert os.environ['LAB_NOTE'] == 'hello'")
        assert one.run(lambda: __import__("torch").get_num_threads()) == [2]


def test_an_odd_gloo_interface_and_hostname_do_not_matter() -> None:
    source = (
        "from labsupport import Ranks\n"
        "with Ranks(2) as ranks: print(ranks.run(lambda: dist.barrier() or rank))"
    )
    env = {"GLOO_SOCKET_IFNAME": "nonsense0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    assert run_as_script(source, env=env) == "[0, 1]"


def test_ranks_do_not_share_random_numbers(two: Ranks) -> None:
    first, second = two.run(lambda: __import__("random").random())
    assert first != second


def test_a_busy_port_29500_and_two_pools_at_once(lines) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        pools = [Ranks(2) for _ in range(3)]  # the same cell three times
        try:
            for pool in pools:
                pool.execute("dist.barrier(); print(rank)")
        finally:
            for pool in pools:
                pool.close()
    assert lines() == ["[0] 0", "[1] 1"] * 3


def test_the_notebooks_process_loads_neither_torch_nor_cuda_nor_forks() -> None:
    shown = run_as_script(
        "import os, sys\n"
        "forked = []\n"
        "os.register_at_fork(before=lambda: forked.append(1))\n"
        "from labsupport import Ranks\n"
        "with Ranks(2) as ranks:\n"
        "    ranks.execute('x = 1'); ranks.run(lambda: rank)\n"
        "print(forked, 'torch' in sys.modules)\n"
    )
    assert shown == "[] False"


def test_closing_leaves_nothing_and_says_so() -> None:
    before = set(descendants(os.getpid()))
    pool = Ranks(3)
    folder = pool._held.crew.folder
    started = set(descendants(os.getpid())) - before
    assert len(started) == 4  # three ranks and what they are forked from
    pool.execute("import subprocess; child = subprocess.Popen(['sleep', '1000'])")
    sleepers = set(descendants(os.getpid())) - before - started
    assert len(sleepers) == 3
    pool.close()
    pool.close()
    assert not still_there([*started, *sleepers])
    assert not folder.exists()
    assert pool.pids == []
    assert "closed" in repr(pool)
    with pytest.raises(RuntimeError, match=r"closed; Ranks\(3\) starts a new one"):
        pool.execute("1")


def test_a_forgotten_pool_ends() -> None:
    pool = Ranks(1)
    pids = pool.pids
    del pool
    assert not still_there(pids)


def test_the_magic_means_the_latest_open_pool() -> None:
    with Ranks(1) as first:
        with Ranks(1) as second:
            assert latest_pool() is second
        assert latest_pool() is first
    assert latest_pool() is not first


def test_an_interrupted_start_leaves_nothing_and_the_next_one_works(monkeypatch) -> None:
    """Ctrl-C while the template still imports torch: its late answer is nobody's rank."""
    before = set(descendants(os.getpid()))
    launcher = launch.ForkLauncher()
    monkeypatch.setattr(launch, "_prestarted", launcher)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Ranks(2)
    with Ranks(2) as ranks:
        assert ranks.run(os.getpid) == ranks.pids
        started = set(descendants(os.getpid())) - before
        assert len(started) == 3  # the template and two ranks; the unwanted one has been killed
    launcher.close()
    assert not still_there(list(started))


def test_one_call_at_a_time(two: Ranks) -> None:
    thread = threading.Thread(target=two.execute, args=("import time; time.sleep(1)",))
    thread.start()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="busy"):
        two.execute("1")
    thread.join()
    two.execute("1")


def test_a_cell_may_take_long_and_gives_all_its_output(two: Ranks, lines) -> None:
    """No default limit: the collective time-out is 4 s here, and says nothing about a cell."""
    two.execute("import time; time.sleep(5.5); dist.barrier(); print('done')")
    assert lines() == ["[0] done", "[1] done"]
