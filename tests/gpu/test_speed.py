"""How fast is the trainer on these GPUs? Recorded, not judged: a test of speed fails for others.

Each case is the command line that a user would type, run by torchrun with one rank a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import REHEARSAL, Machine, Record

from labsupport.jobs import torchrun
from labsupport.results import measured

CASES = {
    "fp32": [],
    "bf16": ["--mixed-precision", "bf16"],
    "bf16, compiled": ["--mixed-precision", "bf16", "--compile"],
    "bf16, compiled, checkpointing": [
        *("--mixed-precision", "bf16", "--compile", "--activation-checkpointing"),
    ],
    "fp8, compiled": ["--mixed-precision", "fp8", "--compile"],
}


@pytest.mark.parametrize("case", CASES)
def test_speed_of_one_gpu(case: str, machine: Machine, record: Record, tmp_path: Path) -> None:
    if REHEARSAL and case != "fp32":
        pytest.skip("one case is enough to see that it runs")
    run_and_record(case, machine, record, tmp_path, world_size=1)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_speed_of_several_gpus(
    sharding: str, several: int, machine: Machine, record: Record, tmp_path: Path
) -> None:
    if REHEARSAL and sharding != "fsdp":
        pytest.skip("one case is enough to see that it runs")
    case = "bf16" if REHEARSAL else "bf16, compiled"
    run_and_record(case, machine, record, tmp_path, world_size=several, sharding=sharding)


def run_and_record(
    case: str,
    machine: Machine,
    record: Record,
    folder: Path,
    *,
    world_size: int,
    sharding: str = "ddp",
) -> None:
    steps, batch = (3, 2) if REHEARSAL else (30, 8)
    args: list[object] = ["--model", machine.model_name, "--seq-len", machine.seq_len]
    args += ["--batch-size", batch, "--steps", steps, "--device", machine.device, "--json"]
    args += ["--data-parallel-sharding", sharding, "--run-dir", folder / "run", *CASES[case]]
    if not REHEARSAL:
        # a global batch of 64 sequences of 1,024 tokens is half of the default text
        args += ["--gradient-accumulation-steps", max(1, 8 // world_size)]
    try:
        result = torchrun("labsupport.train", *args, nproc_per_node=world_size, deadline_s=240)
    except Exception as error:
        if "fp8" in case and "compute capability" in str(error):
            pytest.skip("this GPU has no fp8")
        raise
    rows = [row for row in result.metrics if "step" in row]
    assert len(rows) == steps
    assert rows[-1]["loss"] < rows[0]["loss"]
    late = rows[len(rows) // 2 :]  # compiled and warm
    speed = sorted(row["tokens_per_second"] for row in late)[len(late) // 2]
    on = f"{world_size} × {machine.device}"
    tags = {"case": case, "strategy": sharding, "model": machine.model_name, "batch": batch}
    record(
        measured("tokens per second", speed, "tokens/s", on=on),
        measured("peak memory of a rank", rows[-1]["memory_bytes"], "bytes", on=on),
        world_size=world_size,
        **tags,
    )
    shares = sorted(row["mfu"] for row in late if row["mfu"] is not None)
    if shares:
        mfu = shares[len(shares) // 2]
        record(measured("MFU", mfu, "", on=on), world_size=world_size, **tags)
