"""The trainer under torchrun: the design's own line on 2 and 4 ranks, equal to one process."""

from __future__ import annotations

import contextlib
import io
import json
from functools import lru_cache
from pathlib import Path

import pytest

from labsupport.checkpoint import load_final, load_hf
from labsupport.jobs import JobError, torchrun
from labsupport.results import RunManifest
from labsupport.train.__main__ import main

# The design's line, but for the size of a step: 16 sequences, whatever the number of ranks.
STRATEGY = "--data-parallel-sharding fsdp --mixed-precision bf16 --activation-checkpointing"
STEPS = "--model tiny --global-batch-size 16 --seq-len 32 --steps 4 --warmup-steps 0 --device cpu"


@lru_cache
def one_process(folder: Path, line: str) -> list[float]:
    """Losses of the same run without torchrun."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([*line.split(), "--json", "--run-dir", str(folder)]) == 0
    return [json.loads(text)["loss"] for text in shown.getvalue().splitlines()[:-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_promised_line_gives_one_process_s_curve(
    ranks: int, folder: Path, tmp_path: Path
) -> None:
    line = f"{STEPS} --mixed-precision bf16"
    oracle = one_process(folder, f"{line} --batch-size 8")
    arguments = f"{line} {STRATEGY} --batch-size 2 --json --run-dir {tmp_path}".split()
    job = torchrun("labsupport.train", *arguments, nproc_per_node=ranks, threads=1, deadline_s=120)
    # bf16 keeps 8 bits: losses of 7 nats agree to 3 digits; a lost rank would show at once.
    assert job.metrics.column("loss") == pytest.approx(oracle, abs=0.02)
    assert oracle[0] - oracle[-1] > 0.5
    assert set(job.metrics.column("rank")) == {0}  # rank 0 alone speaks
    assert job.metrics.column("tokens") == [16 * 32] * 4
    assert job.summary["done"] is True
    manifest = RunManifest.read(tmp_path / "manifest.json")
    assert (manifest.strategy, manifest.world_size) == (f"fsdp × {ranks}", ranks)


def test_ddp_in_fp32_gives_the_curve_and_the_weights_of_one_process(
    folder: Path, tmp_path: Path
) -> None:
    sgd = f"{STEPS} --optimizer sgd --learning-rate 0.1"
    oracle = one_process(folder, f"{sgd} --batch-size 16 --checkpoint-dir {folder}")
    arguments = f"{sgd} --batch-size 2 --json --checkpoint-dir {tmp_path}".split()
    job = torchrun("labsupport.train", *arguments, threads=1, deadline_s=120)
    assert job.metrics.column("loss") == pytest.approx(oracle, abs=1e-5)
    ours, theirs = load_final(tmp_path), load_final(folder)
    assert all(
        weight.sub(theirs.model_state[name]).abs().max() < 1e-5
        for name, weight in ours.model_state.items()
    )


@pytest.mark.parametrize(
    ("ranks", "options", "strategy"),
    [
        (2, "--data-parallel-sharding zero2 --gradient-accumulation-steps 4", "zero2 × 2"),
        (2, "--context-parallel-size 2 --activation-checkpointing", "ddp × 1 · tp 1 · cp 2"),
        (
            4,
            "--data-parallel-sharding hsdp --tensor-parallel-size 2 --sequence-parallel "
            "--activation-checkpointing selective",
            "hsdp 2×1 · tp 2 + sp · cp 1",
        ),
    ],
)
def test_every_axis_gives_one_process_s_curve_and_exports_its_weights(
    ranks: int, options: str, strategy: str, folder: Path, tmp_path: Path
) -> None:
    """From weights of an export, to an export again."""
    start, sgd = folder / "start", "--optimizer sgd --learning-rate 0.1 --warmup-steps 0"
    line = f"--seq-len 32 --steps 3 --device cpu --seed 5 {sgd}"
    one_process(folder / "first", f"{STEPS} --batch-size 16 --export-hf {start}")
    oracle = one_process(
        folder / "second",
        f"--model {start} {line} --batch-size 16 --export-hf {folder / 'end'}",
    )
    dp = {2: 1 if "context" in options else 2, 4: 2}[ranks]
    size = 16 // dp // (4 if "accumulation" in options else 1)
    arguments = f"--model {start} {line} {options} --batch-size {size} --json"
    files = f"--run-dir {tmp_path / 'run'} --export-hf {tmp_path / 'end'}"
    job = torchrun(
        "labsupport.train", *f"{arguments} {files}".split(), nproc_per_node=ranks, threads=1,
        deadline_s=120,
    )  # fmt: skip
    assert job.metrics.column("loss") == pytest.approx(oracle, abs=1e-5)
    assert job.metrics.column("tokens") == [16 * 32] * 3
    manifest = RunManifest.read(tmp_path / "run/manifest.json")
    assert (manifest.strategy, manifest.world_size) == (strategy, ranks)
    ours, theirs = load_hf(tmp_path / "end").state_dict, load_hf(folder / "end").state_dict
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)


def test_a_refusal_under_torchrun_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="rank 0 failed: SystemExit: 2") as caught:
        torchrun("labsupport.train", "--seq-len", 5000, threads=1, deadline_s=60)
    assert str(caught.value).count("--seq-len=5000 is longer than 2048") == 1
    assert capsys.readouterr().out.count("--seq-len=5000") == 1
    assert caught.value.others == {1: "stopped by torchrun"}
