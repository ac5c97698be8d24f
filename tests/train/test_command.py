"""One process on the command line: its lines, objects, files, bar and exit code."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from labsupport.checkpoint import load_final
from labsupport.config import TrainConfig
from labsupport.data import load_corpus
from labsupport.model import Llama
from labsupport.results import RunManifest
from labsupport.train.__main__ import main
from labsupport.train.loop import StepRecord, TrainingDivergedError, train
from labsupport.train.optimizer import build_optimizer
from labsupport.train.prepare import prepare
from labsupport.train.report import step_line, step_row
from labsupport.train.request import read_request
from labsupport.train.speed import Speed, speed_of
from labsupport.train.step import StepResult

SMALL = ["--batch-size", "2", "--seq-len", "16", "--device", "cpu", "--seed", "3"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_rows_and_the_files_of_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    *steps, last = objects(out)
    assert err == ""
    assert [row["step"] for row in steps] == [0, 1, 2]
    config = TrainConfig(steps=3)
    assert [row["lr"] for row in steps] == [config.learning_rate_at(step) for step in range(3)]
    assert all(7 < row["loss"] < 9 and row["grad_norm"] > 0 for row in steps)
    assert all(row["tokens"] == 32 and row["tokens_per_second"] > 0 for row in steps)
    assert {row["memory_of"] for row in steps} == {"process RSS"}
    assert steps[0]["mfu"] is None  # nobody knows the peak of this CPU
    assert last["done"] is True
    assert last["tokens"] == 96
    (run_dir,) = here.glob("runs/*-tiny-ddp1-*")
    assert last["run_dir"] == str(run_dir.relative_to(here))
    assert objects((run_dir / "metrics.jsonl").read_text()) == steps
    manifest = RunManifest.read(run_dir / "manifest.json")
    assert manifest.dataset_sha256 == load_corpus().sha256
    assert manifest.strategy == "ddp × 1"
    assert (manifest.world_size, manifest.seed) == (1, 3)
    assert manifest.config["train"]["micro_batch_size"] == 2
    assert len(manifest.config_sha256) == len(manifest.tokenizer_sha256) == 64


def test_lines_for_people(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "5", "--log-every", "2", "--run-dir", "mine"]) == 0
    first, *steps, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "tiny, 1,311,872 parameters: ddp × 1, fp32, batch 2 × 1 × 1 = 2 sequences of 16 tokens; "
    )
    numbers = r"step +\d  loss \d\.\d{4}  lr \S+  \|g\| \d+\.\d+  [\d,]+ tokens/s"
    assert all(re.fullmatch(numbers + "  process RSS .* [MG]iB", line) for line in steps)
    assert [line.split()[1] for line in steps] == ["0", "2", "4"]
    assert last.startswith("done: 5 steps in ")
    assert last.endswith("run_dir mine")
    assert len((here / "mine/metrics.jsonl").read_text().splitlines()) == 5
    assert not (here / "runs").exists()


def test_checkpoint_and_export_and_training_on_from_the_export(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--checkpoint-dir", "out/checkpoint", "--export-hf", "out/hf"]
    assert main([*SMALL, "--steps", "4", "--warmup-steps", "0", "--json", *written]) == 0
    before = objects(capsys.readouterr().out)
    kept = load_final("out/checkpoint")
    assert kept.step == 4
    assert kept.manifest == RunManifest.read("out/checkpoint/manifest.json").to_dict()
    assert RunManifest.read("out/hf/manifest.json").to_dict() == kept.manifest
    assert main(["--model", "out/hf", *SMALL, "--steps", "1", "--json", "--run-dir", "r"]) == 0
    after = objects(capsys.readouterr().out)
    # The same first batch, learned from: the weights and the tokenizer came along.
    assert after[0]["loss"] < before[0]["loss"] - 0.3
    corpus = load_corpus()
    batch = corpus.batch(0, seq_len=16, global_batch_size=2, seed=3)
    model = Llama.from_hf_state_dict(read_request([]).model, kept.model_state)
    assert after[0]["loss"] == pytest.approx(model.loss(batch.input_ids, batch.labels).item(), 1e-5)


def test_a_folder_without_one_of_its_weights_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--steps", "1", "--export-hf", "hf", "--run-dir", "r"]) == 0
    weights = load_file("hf/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "hf/model.safetensors")
    capsys.readouterr()
    assert main(["--model", "hf", *SMALL, "--run-dir", "r"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "weights do not fit the model; Error(s) in loading state_dict for Llama: Missing" in err


def test_fsdp_in_one_process_gives_the_same_losses(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = []
    for sharding in ("ddp", "fsdp"):
        line = [*SMALL, "--steps", "3", "--json", "--data-parallel-sharding", sharding]
        assert main(line) == 0
        curves.append([row["loss"] for row in objects(capsys.readouterr().out)[:3]])
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_shards_are_drawn_where_they_lie(here: Path) -> None:
    """Under fsdp no rank ever holds the whole model; ddp, and weights from a folder, need it."""
    fsdp = ["--data-parallel-sharding", "fsdp"]
    starts = [prepare(read_request([*SMALL, *flags], world_size=2)) for flags in (fsdp, [])]
    assert [next(start.model.parameters()).is_meta for start in starts] == [True, False]


def test_a_run_that_diverges_stops_and_says_why(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ["--optimizer", "sgd", "--learning-rate", "1e30", "--grad-clip", "none"]
    assert main([*SMALL, *wild, "--steps", "50", "--log-every", "50"]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "step 10: 10 steps in a row were skipped" in err
    assert out.count("skipped: the gradient was not finite") == 10


def test_divergence_names_the_ranks() -> None:
    model = Llama(read_request([]).model)
    model.lm_head.register_forward_hook(lambda *call: call[-1] * math.nan)
    config = TrainConfig(seq_len=16, micro_batch_size=1)
    records = train(model, build_optimizer(model, config), load_corpus(), config)
    with pytest.raises(TrainingDivergedError, match=r"step 9: 10 steps.*not finite on rank 0"):
        list(records)


def test_a_bar_on_a_terminal_only(here: Path) -> None:
    owner, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "labsupport.train", *SMALL, "--steps", "2"]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                piece = os.read(owner, 65536)
            except OSError:  # Linux: the other side has closed
                break
            if not piece:
                break
            shown += piece
    os.close(owner)
    text = shown.decode()
    assert process.returncode == 0
    assert "2/2" in text
    assert re.search(r"step +1  loss", text)
    assert "\r\n" in text


def record(**changes: Any) -> StepRecord:
    result = StepResult(loss=2.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=1000, **changes)
    return StepRecord(7, result, seconds=0.5, memory_bytes=2**30, memory_of="CUDA peak")


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    request = read_request(["--activation-checkpointing"])
    unknown = speed_of(request.model, request.config, device=torch.device("cpu"), world_size=1)
    known = Speed(flops=unknown.flops, causal_flops=unknown.causal_flops, peak_flops_per_s=1e11)
    row = step_row(record(), known)
    # 2000 tokens/s × FLOPs per token, by hand: 6 N without the embedding, 12 · 4 · 128 · 128.
    by_hand = 6 * (1_311_872 - 2048 * 128 - 9 * 128) + 12 * 4 * 128 * 128
    assert row["mfu"] == pytest.approx(2000 * by_hand / 1e11)
    assert row["mfu_causal"] < row["mfu"] < row["hfu"]
    assert f"MFU {row['mfu']:.1%}" in step_line(record(), mfu=row["mfu"])
    assert step_row(record(), unknown)["mfu"] is None
    assert "MFU" not in step_line(record(), mfu=None)


def test_what_json_cannot_say_is_null() -> None:
    ill = StepResult(math.nan, math.inf, 1e-3, 10, skipped=True, nonfinite_ranks=(1,))
    request = read_request([])
    speed = speed_of(request.model, request.config, device=torch.device("cpu"), world_size=1)
    shown = StepRecord(0, ill, seconds=1.0, memory_bytes=1, memory_of="process RSS")
    row = step_row(shown, speed)
    assert (row["loss"], row["grad_norm"], row["nonfinite_ranks"]) == (None, None, [1])
    assert "NaN" not in json.dumps(row)
    assert step_line(shown, mfu=None).endswith("skipped: the loss was not finite on rank 1")
