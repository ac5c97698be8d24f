"""What the command line may ask for, and how it is refused: in its own words, at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labsupport.config import ModelConfig
from labsupport.train.__main__ import main
from labsupport.train.request import read_request

# The line that the design promises.
PROMISED = (
    "--model tiny --data-parallel-sharding fsdp --mixed-precision bf16 "
    "--activation-checkpointing --batch-size 8 --gradient-accumulation-steps 16"
)


def test_the_promised_line() -> None:
    request = read_request(PROMISED.split(), world_size=4)
    assert request.model == ModelConfig.named("tiny")
    assert request.strategy == "fsdp × 4"
    assert str(request.config.recompute) == "full"
    assert request.config.mixed_precision == "bf16"
    assert request.config.global_batch_size(request.parallel) == 8 * 16 * 4


def test_a_global_batch_gives_the_accumulation() -> None:
    request = read_request(["--batch-size", "4", "--global-batch-size", "48"], world_size=3)
    assert request.config.gradient_accumulation_steps == 4


def test_clipping_can_be_turned_off() -> None:
    assert read_request(["--grad-clip", "none"]).config.grad_clip is None


REFUSED = [
    ("--batch-size 0", "--batch-size=0 must be a whole number of at least 1, for example 2"),
    ("--batch-size -3", "--batch-size=-3 must be"),
    ("--gradient-accumulation-steps -1", "--gradient-accumulation-steps=-1 must be"),
    ("--steps -1", "--steps=-1 must be"),
    ("--steps many", "--steps: invalid int value: 'many'"),
    ("--seed -1", "--seed=-1 must be"),
    ("--seed 99999999999999999999", "--seed=99999999999999999999 must be below 2**63"),
    ("--warmup-steps -1", "--warmup-steps=-1 must be"),
    ("--learning-rate -0.1", "--learning-rate=-0.1 must be positive, for example 0.003"),
    ("--learning-rate nan", "--learning-rate=nan must be positive"),
    ("--weight-decay -1", "--weight-decay=-1.0 must not be negative"),
    ("--weight-decay inf", "--weight-decay=inf must not be negative or infinite"),
    ("--grad-clip 0", "--grad-clip=0.0 must be positive"),
    ("--grad-clip inf", "--grad-clip=inf must be positive and finite, or None"),
    ("--dropout 1", "--dropout=1.0 must be at least 0 and below 1, for example 0.1"),
    ("--log-every 0", "--log-every=0 must be at least 1"),
    ("--seq-len 4096", "--seq-len=4096 is longer than 2048"),
    ("--batch-size 3 --global-batch-size 16", "--global-batch-size=16 must be a multiple of 3 "),
    ("--global-batch-size 4 --gradient-accumulation-steps 2", "not allowed with"),
    ("--model gpt-2", "choose one of tiny, 15m, 125m, 1b, llama-3.1-8b, or give a Hugging Face"),
    ("--model " + 400 * "a", "choose one of tiny"),
    ("--model ~nobody-here/model", "choose one of tiny"),
    ("--run-dir ~nobody-here/run", "--run-dir: nobody has the home directory"),
    ("--model {tmp}", "has no readable config.json"),
    ("--model {foreign}", "holds no Llama that can be built here"),
    ("--mixed-precision int4", "--mixed-precision: invalid choice: 'int4'"),
    ("--optimizer lion", "--optimizer: invalid choice: 'lion'"),
    ("--activation-checkpointing some", "--activation-checkpointing='some' is unknown"),
    ("--data-parallel-sharding zero3", "--data-parallel-sharding: invalid choice: 'zero3'"),
    ("--data-parallel-replicate-size 2", "=2 must divide --data-parallel-size=1, for example 1"),
    ("--tensor-parallel-size 2", "world_size=1 must be a multiple of 2"),
    ("--sequence-parallel", "--tensor-parallel-size=1; use --tensor-parallel-size=2, or leave it"),
    ("--pipeline-parallel-size 2", "--pipeline-parallel-size=2 is not built yet"),
    ("--pipeline-parallel-size 0", "--pipeline-parallel-size=0 must be at least 1"),
    ("--data {tmp}/missing.txt", "cannot be read (No such file or directory)"),
    ("--data {empty}", "holds 0 characters"),
    ("--data {binary}", "is not UTF-8 text"),
    ("--run-dir {empty}/run", "is a file"),
    ("--export-hf {empty}", "is a file"),
    ("--export-hf out --checkpoint-dir out", "an export has its folder to itself; name another"),
    ("--export-hf out --run-dir out/run", "would hold 'out/run' of the same run"),
    ("--export-hf runs", "for example 'runs/hf'"),
    ("--no-such-option", "unrecognized arguments: --no-such-option"),
]
ON_RANKS = [  # ranks, line, message
    (4, "--data-parallel-replicate-size 2", "--data-parallel-replicate-size=2 is for hsdp only"),
    (
        4,
        "--data-parallel-sharding hsdp --data-parallel-replicate-size 3",
        "--data-parallel-replicate-size=3 must divide --data-parallel-size=4, for example 2",
    ),
    (
        3,
        "--tensor-parallel-size 3",
        "--tensor-parallel-size=3 must divide num_heads=4, and num_kv_heads=2 or be a multiple of "
        "it, for example 2",
    ),
    (8, "--tensor-parallel-size 8", "--tensor-parallel-size=8 must divide num_heads=4, for exam"),
    (6, "--tensor-parallel-size 4", "world_size=6 must be a multiple of 4"),
    (3, "--context-parallel-size 3", "--seq-len=128 must be a multiple of 6 (2 chunks × 3 "),
    (
        2,
        "--tensor-parallel-size 2 --sequence-parallel --seq-len 33",
        "--seq-len=33 must be a multiple of 2 (2 tensor-parallel ranks split the sequence), for "
        "example 32",
    ),
    (
        2,
        "--tensor-parallel-size 2 --data-parallel-sharding zero2",
        "--data-parallel-sharding='zero2' cuts whole weights into rows, and "
        "--tensor-parallel-size=2 leaves a rank parts of weights; use 'fsdp' or 'hsdp'",
    ),
    (
        2,
        "--tensor-parallel-size 2 --mixed-precision fp8-emulated",
        "--mixed-precision='fp8-emulated' scales whole matrices, and --tensor-parallel-size=2",
    ),
    (4, "--batch-size 3 --global-batch-size 16 --tensor-parallel-size 2", " × 2 data-parallel"),
]
NEEDS_TORCH = [
    ("--mixed-precision fp8 --device cpu", "needs a GPU of compute capability 8.9"),
    ("--device cuda", "needs a GPU a rank"),
    ("--activation-checkpointing offload --device cpu", "moves activations from a GPU"),
    ("--data {short} --batch-size 64", "one global batch takes 64; --batch-size"),
    ("--data {short} --seq-len 2000", "a shorter --seq-len or a longer text works"),
    ("--checkpoint-dir /proc/nowhere/here", "cannot be written"),
]


@pytest.mark.parametrize(
    ("line", "ranks", "num_nodes", "strategy"),
    [
        ("", 4, 1, "ddp × 4"),
        ("--data-parallel-sharding zero2", 4, 1, "zero2 × 4"),
        ("--data-parallel-sharding hsdp", 8, 1, "hsdp 2×4"),
        ("--data-parallel-sharding hsdp", 12, 3, "hsdp 3×4"),  # a copy on each node
        ("--data-parallel-sharding hsdp", 3, 1, "hsdp 1×3"),
        ("--data-parallel-sharding hsdp --data-parallel-replicate-size 4", 8, 1, "hsdp 4×2"),
        ("--data-parallel-sharding hsdp --tensor-parallel-size 2", 8, 1, "hsdp 2×2 · tp 2 · cp 1"),
        ("--tensor-parallel-size 2 --sequence-parallel", 4, 1, "ddp × 2 · tp 2 + sp · cp 1"),
        ("--tensor-parallel-size 4", 4, 1, "ddp × 1 · tp 4 · cp 1"),  # 2 key-value heads
        ("--context-parallel-size 2 --tensor-parallel-size 2", 4, 1, "ddp × 1 · tp 2 · cp 2"),
    ],
)
def test_strategies(line: str, ranks: int, num_nodes: int, strategy: str) -> None:
    request = read_request(line.split(), world_size=ranks, num_nodes=num_nodes)
    assert request.strategy == strategy
    assert request.parallel.world_size == ranks


@pytest.mark.parametrize(("ranks", "line", "message"), ON_RANKS)
def test_what_does_not_fit_the_ranks_is_refused(ranks: int, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        read_request(line.split(), world_size=ranks)
    assert message in str(caught.value)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files and folders that the refused lines name; whatever is written lands beside them."""
    files = {name: tmp_path / name for name in ("empty", "binary", "short", "foreign")}
    files["empty"].touch()
    files["binary"].write_bytes(bytes(range(256)) * 20)
    files["short"].write_text("a few words to learn from, " * 50)
    files["foreign"].mkdir()
    (files["foreign"] / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    monkeypatch.chdir(tmp_path)
    return {"tmp": tmp_path, **files}


@pytest.mark.parametrize(("line", "message"), REFUSED + NEEDS_TORCH)
def test_bad_input_is_one_line_and_exit_code_2(
    line: str, message: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if line == "--device cuda" and _has_gpu():
        pytest.skip("there is a GPU here")
    before = sorted(places["tmp"].iterdir())
    assert main(line.format(**places).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("labsupport.train: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(places["tmp"].iterdir()) == before  # nothing was left behind


def _has_gpu() -> bool:
    from labsupport.devices import gpu_count

    return gpu_count() > 0


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("labsupport.train.__main__.WAIT_TO_BE_STOPPED_S", 0.0)
    assert main(["--steps", "0"]) == 2
    assert capsys.readouterr() == ("", "")


def test_help_and_refusals_do_not_load_torch(places: dict[str, Path]) -> None:
    lines = [line.format(**places).split() for line, _ in REFUSED]
    code = (
        "import sys; from labsupport.train.__main__ import main;"
        f"codes = [main(line) for line in {lines!r}]; print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == f"{[2] * len(lines)} False"
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
