"""Accelerate's loop equals one process, from a notebook's function and as a command; FSDP2 too."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labsupport.jobs import JobError, JobTimeout
from labsupport.jobs.accelerate import accelerate_launch, notebook_launch
from labsupport.train.accelerate_loop import fsdp2_plugin, make_accelerator, prove_accelerate
from labsupport.train.optimizer import build_optimizer
from labsupport.train.proof import Proof, RankProof
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, build


def test_from_a_notebook_it_equals_one_process() -> None:
    proof = Proof(tuple(notebook_launch(prove_accelerate, num_processes=2)))
    assert proof.is_equal, proof
    assert [(rank.rank, rank.world_size) for rank in proof.ranks] == [(0, 2), (1, 2)]


def _prove_fsdp2() -> tuple[RankProof, int, int]:
    """The proof, then bytes of all parameters, and of those that this process holds after it."""
    proof = prove_accelerate(plugin=fsdp2_plugin)
    accelerator = make_accelerator(PROOF_CONFIG, plugin=fsdp2_plugin)
    model = build(PROOF_MODEL, PROOF_CONFIG, seed=0)
    whole = sum(param.nbytes for param in model.parameters())
    model, _ = accelerator.prepare(model, build_optimizer(model, PROOF_CONFIG))
    return proof, whole, sum(param.to_local().nbytes for param in model.parameters())


def test_with_the_fsdp2_plugin_the_same_loop_shards_and_equals_one_process() -> None:
    found = notebook_launch(_prove_fsdp2, num_processes=2)
    proof = Proof(tuple(one for one, _, _ in found))
    assert proof.is_equal, proof
    for one, whole, here in found:
        assert 0.9 < one.exchanges < 1.1  # gradients travel once a step, not once a micro batch
        assert here == whole / 2


def test_as_a_command_it_equals_one_process() -> None:
    result = accelerate_launch("labsupport.train.accelerate_loop", num_processes=2)
    said = {rank: json.loads(path.read_text()) for rank, path in result.log_paths.items()}
    assert sorted(row["rank"] for row in said.values()) == [0, 1]
    assert all(row["is_equal"] for row in said.values()), said


def test_output_results_and_failures_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    def greet(word: str) -> str:
        import os

        print(word, "from", os.environ.get("RANK", "0"))
        if word == "fail":
            raise ValueError(f"no {word} today")
        return word

    assert notebook_launch(greet, "hello", num_processes=1) == ["hello"]
    assert "[rank 0] hello from 0" in capsys.readouterr().out
    with pytest.raises(JobError, match="ValueError: no fail today"):
        notebook_launch(greet, "fail", num_processes=1)


def test_a_deadline_and_a_dead_owner_end_all_processes(tmp_path: Path) -> None:
    def hang() -> None:
        import time

        time.sleep(300)

    with pytest.raises(JobTimeout, match="did not end within 6 s"):
        notebook_launch(hang, num_processes=2, deadline_s=6)
    script = tmp_path / "owner.py"
    script.write_text(
        "import os, time\n"
        "from labsupport.jobs.accelerate import notebook_launch\n"
        "def hang():\n"
        "    open(f'{os.environ[\"PIDS\"]}/{os.getpid()}', 'w').close()\n"
        "    time.sleep(300)\n"
        "notebook_launch(hang, num_processes=2)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    owner = subprocess.Popen([sys.executable, str(script)], env={"PIDS": str(pids)}, cwd="/")
    try:
        _wait_until(lambda: len(list(pids.iterdir())) == 2, within_s=60)
    finally:
        owner.kill()
        owner.wait()
    started = [int(path.name) for path in pids.iterdir()]
    _wait_until(lambda: not any(map(_runs, started)), within_s=10)


def _wait_until(condition: object, *, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
