"""Every way in which ranks fail: who is named, what is shown, and that the next cell works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from labsupport import RankDied, RankError, Ranks, RankTimeout
from tests.ranks.conftest import still_there

BARRIER = "dist.barrier()"


@pytest.fixture(autouse=True)
def _usable_afterwards(two: Ranks) -> Iterator[None]:
    """After each failure the next cell works, collectives included."""
    yield
    two.execute("t = torch.ones(2) * (rank + 1); dist.all_reduce(t); assert t.tolist() == [3, 3]")


def fails(two: Ranks, kind: type[RankError], code: str, *, within_s: float, **how) -> RankError:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        two.execute(code, **how)
    took = time.monotonic() - started
    assert took < within_s, f"took {took:.1f} s"
    assert type(caught.value) is kind
    return caught.value


def shown(error: RankError) -> list[str]:
    return [line for line in error._render_traceback_() if line]


def test_the_first_failing_rank_comes_first(two: Ranks) -> None:
    two.execute("kept = 5")
    code = f"def step():\n    raise ValueError('no data')\nif rank == 1: step()\n{BARRIER}"
    error = fails(two, RankError, code, within_s=4)
    assert error.rank == 1
    assert str(error) == "rank 1 failed: ValueError: no data"
    assert shown(error)[:6] == [
        "RankError: rank 1 failed: ValueError: no data",
        "  cell, line 3",
        "    if rank == 1: step()",
        "  cell, line 2, in step",
        "    raise ValueError('no data')",
        "ValueError: no data",
    ]
    assert error.others == {0: "waited in barrier() and was freed"}
    two.execute("assert kept == 5")  # the ranks went on with their variables


def test_of_ranks_that_fail_alike_the_lowest_is_told(two: Ranks) -> None:
    code = "import time\nif rank == 0: time.sleep(0.3)\nraise ValueError('the same')"
    assert fails(two, RankError, code, within_s=3).rank == 0
    code = "import time\nif rank == 0: time.sleep(0.3)\nraise ValueError(rank)"
    assert fails(two, RankError, code, within_s=3).rank == 1


def test_all_ranks_fail_alike(two: Ranks) -> None:
    error = fails(two, RankError, "{}['missing']", within_s=2)
    assert error.rank == 0
    assert error.others == {1: "also failed: KeyError: 'missing'"}
    assert error.note == ""


def test_a_failure_in_a_function_shows_the_functions_lines(two: Ranks) -> None:
    def divide(x: int) -> float:
        return x / 0

    with pytest.raises(RankError) as caught:
        two.run(divide, 1)
    assert "return x / 0" in caught.value.remote_traceback
    assert "__lab__" not in caught.value.remote_traceback


@pytest.mark.parametrize("code", ["def f(:\n  pass", "import sys; sys.exit(3)", "raise Exception"])
def test_odd_errors_are_errors_too(two: Ranks, code: str) -> None:
    error = fails(two, RankError, code, within_s=2)
    assert "ipykernel_" not in "\n".join(shown(error))
    assert "\x1b" not in error.remote_traceback


def test_a_cause_is_shown_before_its_consequence(two: Ranks) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e"
    text = fails(two, RankError, code, within_s=2).remote_traceback
    assert text.index("ZeroDivisionError") < text.index("ValueError: x")


def test_a_skipped_collective_names_the_rank_that_did_not_come(two: Ranks) -> None:
    error = fails(two, RankTimeout, f"if rank == 0: {BARRIER}", within_s=4)
    assert isinstance(error, RankTimeout)
    assert str(error) == (
        "rank 1 did not come to barrier(): it had ended the cell; rank 0 waited there"
    )
    assert (error.rank, error.waiting) == (1, [0])
    assert f"if rank == 0: {BARRIER}" in error.stacks[0]
    assert error.stacks[1] == "  (it had ended the cell)"


def test_a_collective_that_a_busy_rank_does_not_reach(two: Ranks) -> None:
    code = f"import time\nif rank == 0: {BARRIER}\nelse: time.sleep(60)"
    error = fails(two, RankTimeout, code, within_s=4 + 4)
    assert isinstance(error, RankTimeout)
    assert "rank 1 did not come to barrier(): it was doing something else" in str(error)
    assert "time.sleep(60)" in error.stacks[1]


def test_a_collective_called_by_cpp_code_leaves_no_note_but_names_the_rank(two: Ranks) -> None:
    code = (
        "import torch.distributed._functional_collectives as functional\n"
        "if rank == 0:\n"
        "    functional.all_reduce(torch.ones(1), 'sum', dist.group.WORLD).wait()"
    )
    error = fails(two, RankTimeout, code, within_s=4 + 4)
    assert str(error) == "rank 0 waited in a collective to which rank 1 did not come"
    assert (error.rank, error.waiting) == (1, [0])


def test_a_slow_rank_is_not_taken_for_an_absent_one(two: Ranks) -> None:
    two.execute(f"import time\nif rank: time.sleep(2.5)\n{BARRIER}")


def test_an_asynchronous_collective_may_outlive_the_cell(two: Ranks) -> None:
    two.execute("x = torch.ones(1); work = dist.all_reduce(x, async_op=True)\nif rank: work.wait()")
    two.execute("work.wait(); assert x.item() == 2")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "dist.all_reduce(torch.ones(4 + rank))",
            "rank 0 calls all_reduce(float32[4], sum), rank 1 calls all_reduce(float32[5], sum)",
        ),
        (
            "dist.all_reduce(torch.ones(4)) if rank else dist.barrier()",
            "rank 0 calls barrier(), rank 1 calls all_reduce(float32[4], sum)",
        ),
        (
            "dist.broadcast(torch.ones(2), src=rank)",
            "rank 0 calls broadcast(float32[2], src=0), rank 1 calls broadcast(float32[2], src=1)",
        ),
        (
            "dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][rank]))",
            "rank 0 calls all_reduce(float32[2], sum), rank 1 calls all_reduce(float64[2], sum)",
        ),
        (
            "dist.all_reduce(torch.ones(2), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])",
            "rank 0 calls all_reduce(float32[2], sum), rank 1 calls all_reduce(float32[2], max)",
        ),
    ],
)
def test_different_calls_are_told_with_both_shapes(two: Ranks, code: str, told: str) -> None:
    error = fails(two, RankError, code, within_s=4)
    assert told in str(error)


def test_calls_may_differ_where_they_are_allowed_to(two: Ranks) -> None:
    two.execute(
        "objects = [None, None]; dist.all_gather_object(objects, 'x' * (rank + 1) * 100)\n"
        "out = torch.empty(3); dist.all_to_all_single(out, torch.ones(3),"
        " [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1])\n"
        "parts = [torch.ones(1)] * 2 if rank == 0 else None\n"
        "dist.scatter(torch.empty(1), parts, src=0)\n"
        "sub = dist.new_group([1])\n"
        "if rank == 1: dist.barrier(sub)\n"
        "ops = [dist.P2POp(dist.isend, torch.ones(1), 1 - rank),"
        " dist.P2POp(dist.irecv, torch.empty(1), 1 - rank)]\n"
        "[work.wait() for work in dist.batch_isend_irecv(ops)]\n"
        "dist.barrier()"
    )


def test_the_same_call_may_be_written_in_two_ways(two: Ranks) -> None:
    two.execute(
        "out = torch.empty(1)\n"
        "if rank == 0: dist.scatter(out, [torch.ones(1)] * 2)\n"
        "else: dist.scatter(out, src=0)\n"
        "dist.broadcast(out, src=0) if rank else dist.broadcast(out, group_src=0)\n"
        "dist.all_reduce(out, dist.ReduceOp(dist.ReduceOp.SUM))"
    )
    error = fails(two, RankTimeout, "if rank == 0: dist.recv(out, group_src=1)", within_s=6)
    assert str(error) == "rank 0 waited in recv(float32[1]) from rank 1: it had ended the cell"


def test_another_thread_does_not_hide_a_call(two: Ranks) -> None:
    two.execute(
        "import threading, time\n"
        "side = dist.new_group()\n"
        "def slow():\n"
        "    time.sleep(0.3 * rank); dist.barrier(side)\n"
        "thread = threading.Thread(target=slow); thread.start(); time.sleep(0.1)\n"
        "dist.all_reduce(torch.ones(3)); thread.join()\n"
    )
    assert two._held.crew.board.is_level()
    assert two._held.crew.board.last_sequence(0, "WORLD") == two._held.crew.board.last_sequence(
        1, "WORLD"
    )


def test_a_cell_that_changes_master_port_loses_nothing(two: Ranks) -> None:
    code = (
        "import os; os.environ['MASTER_PORT'] = '29500'; dist.init_process_group(); kept = 1\n"
        f"if rank == 0: {BARRIER}"
    )
    fails(two, RankTimeout, code, within_s=4)
    two.execute("assert kept == 1")


def test_two_ranks_that_wait_for_each_other(two: Ranks) -> None:
    error = fails(two, RankTimeout, "dist.recv(torch.empty(4), 1 - rank)", within_s=4 + 4)
    assert str(error) == (
        "nothing moved for 4 s: rank 0 waited in recv(float32[4]) from rank 1; "
        "rank 1 waited in recv(float32[4]) from rank 0"
    )


def test_a_message_that_nobody_sends(two: Ranks) -> None:
    error = fails(two, RankTimeout, "if rank == 0: dist.recv(torch.empty(4), 1)", within_s=6)
    assert str(error) == "rank 0 waited in recv(float32[4]) from rank 1: it had ended the cell"


def test_a_collective_on_some_ranks_only(two: Ranks) -> None:
    error = fails(two, RankTimeout, BARRIER, within_s=4, ranks=[0])
    assert "it was not asked to run this cell" in str(error)


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("os.kill(os.getpid(), 9)", -9, "killed by signal 9 (SIGKILL)"),
        ("os._exit(3)", 3, "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", -11, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_rank_that_dies(two: Ranks, lines, code: str, exit_code: int, told: str) -> None:
    code = f"import os\nif rank == 1:\n    {code}\n{BARRIER}"
    error = fails(two, RankDied, code, within_s=10)
    assert isinstance(error, RankDied)
    assert (error.rank, error.exit_code) == (1, exit_code)
    assert str(error) == f"rank 1 died: {told}"
    assert "ctypes.string_at(0)" in error.remote_traceback or exit_code != -11
    assert error.others == {0: "lost its connection and stopped in consequence"}
    assert "new ones" in error.note
    lines()
    two.execute("print('again')")
    assert lines() == [
        "[the ranks were started anew: what earlier cells defined on them is gone]",
        "[0] again",
        "[1] again",
    ]


def test_what_a_dead_rank_had_started_ends_too(two: Ranks) -> None:
    two.execute("import os, subprocess; child = subprocess.Popen(['sleep', '1000'])")
    children = two.run(lambda: __import__("__main__").child.pid)
    fails(two, RankDied, "if rank == 1: os._exit(3)", within_s=10)
    assert not still_there(children)


def test_a_rank_killed_between_two_cells(two: Ranks, lines) -> None:
    os.kill(two.pids[1], signal.SIGKILL)
    time.sleep(0.5)
    two.execute("print(rank)")
    assert lines()[-2:] == ["[0] 0", "[1] 1"]


def test_a_killed_template_takes_its_ranks_along_and_is_replaced(two: Ranks) -> None:
    template = two._held.launcher._process.pid
    os.kill(template, signal.SIGKILL)
    time.sleep(1.0)
    two.execute("assert world_size == 2")
    assert two._held.launcher._process.pid != template


def test_a_deadline_stops_the_work_too(two: Ranks) -> None:
    code = "import time\nkept = 1\nwhile True: time.sleep(0.1); kept += 1"
    error = fails(two, RankTimeout, code, within_s=6, deadline_s=1.0)
    assert isinstance(error, RankTimeout)
    assert str(error) == "ranks 0 and 1 did not answer within the deadline of 1 s"
    assert error.waiting == [0, 1]
    assert "time.sleep(0.1)" in error.stacks[1]
    two.execute("before = kept; time.sleep(0.5); assert kept == before > 1")


def test_a_failure_before_the_deadline_is_the_cause(two: Ranks) -> None:
    code = "import time\nif rank == 0: raise ValueError('first')\ntime.sleep(60)"
    error = fails(two, RankError, code, within_s=6, deadline_s=1.5)
    assert str(error) == "rank 0 failed: ValueError: first"
    assert error.others == {1: "was still running and was interrupted"}


def test_a_deadline_on_run(two: Ranks) -> None:
    with pytest.raises(RankTimeout) as caught:
        two.run(lambda: time.sleep(60), deadline_s=0.5)
    assert caught.value.waiting == [0, 1]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda lock: (lambda: lock, ()), "variable 'lock' \\(a lock\\)"),
        (lambda lock: (print, (1, lock)), "argument 2 \\(a lock\\)"),
        (lambda lock: ("not a function", ()), "not callable"),
    ],
)
def test_what_cannot_be_sent_is_named_at_once(two: Ranks, make: Callable, named: str) -> None:
    import threading

    function, args = make(threading.Lock())
    started = time.monotonic()
    with pytest.raises(TypeError, match=named):
        two.run(function, *args)
    assert time.monotonic() - started < 2


def test_a_result_that_cannot_come_back_is_named(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"the result \(a generator\) cannot be sent back"):
        two.run(lambda: (x for x in range(3)))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"world_size": 0}, "at least 1"),
        ({"world_size": 2.0}, "whole number"),
        ({"world_size": 10**6}, "at most"),
        ({"world_size": 2, "device": "tpu"}, "'cpu' or 'cuda'"),
        ({"world_size": 2, "collective_timeout_s": 0}, "30 works"),
        ({"world_size": 2, "collective_timeout_s": float("inf")}, "30 works"),
        ({"world_size": 2, "threads_per_rank": 0}, "1 works"),
        ({"world_size": 2, "env": {"A": 1}}, "'1' works"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict, told: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=told):
        Ranks(**arguments)
    assert time.monotonic() - started < 0.5


def test_a_group_that_cannot_be_made_is_one_clear_error() -> None:
    with pytest.raises(RankError, match=r"could not join the others: .*nonsense0") as caught:
        Ranks(2, env={"GLOO_SOCKET_IFNAME": "nonsense0"})
    assert "crew.py" not in "\n".join(shown(caught.value))


def test_a_bad_deadline(two: Ranks) -> None:
    with pytest.raises(ValueError, match="above 0"):
        two.execute("1", deadline_s=0)
