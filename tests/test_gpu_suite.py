"""The GPU suite on a machine that has none: it says so, and in a rehearsal its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labsupport.devices import gpu_count
from labsupport.results import recorded_runs

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(bool(gpu_count()), reason="here `make test-gpu` runs it for real")


def run_suite(*args: str, **env: str) -> str:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", *args]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, text=True, capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_without_a_gpu_it_says_so_and_skips() -> None:
    output = run_suite("--session-timeout", "720")  # the option that `make test-gpu` relies on
    assert "no GPU is visible here" in output
    assert re.search(r"^\d+ skipped", output, re.MULTILINE)


@pytest.mark.slow
def test_rehearsed_on_a_cpu_it_passes_and_records(tmp_path: Path) -> None:
    output = run_suite(LAB_REHEARSE_GPU="1", LABSUPPORT_RECORDED=str(tmp_path))
    assert re.search(r"\d+ passed", output)
    kept = recorded_runs(tmp_path)
    assert {"tokens per second", "peak memory"} <= {row.quantity.name for row in kept}
    assert {row.quantity.label for row in kept} == {"recorded", "predicted"}
