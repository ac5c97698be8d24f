"""The GPU suite: `make test-gpu`, unattended, on one GPU or several.

What it measures goes to `recorded/gpu.jsonl` (or $LABSUPPORT_RECORDED), where notebooks find it. On
a machine without a GPU every test is skipped. With LAB_REHEARSE_GPU=1 the same code runs on CPU
ranks and a small model, so that a maintainer without a GPU sees that it runs at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
import torch

from labsupport.config import ModelConfig
from labsupport.data import Corpus, load_corpus
from labsupport.devices import describe, gpu_count
from labsupport.results import Quantity, RunManifest, Store
from labsupport.results.recordings import recorded_folder

REHEARSAL = os.environ.get("LAB_REHEARSE_GPU") == "1"
NO_GPU = "no GPU is visible here: nothing to check (LAB_REHEARSE_GPU=1 runs this on the CPU)"
Record = Callable[..., None]


@dataclass(frozen=True)
class Machine:
    """What the suite runs on, and how large its work is."""

    device: str
    num_gpus: int
    model_name: str
    """Large enough to keep a GPU busy; tiny in a rehearsal."""
    seq_len: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.named(self.model_name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not REHEARSAL and not gpu_count():
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(scope="session")
def machine() -> Machine:
    if REHEARSAL:
        torch.set_num_threads(1)
        return Machine(device="cpu", num_gpus=2, model_name="tiny", seq_len=64)
    return Machine(device="cuda", num_gpus=gpu_count(), model_name="125m", seq_len=1024)


@pytest.fixture(scope="session")
def several(machine: Machine) -> int:
    """Ranks of the tests that need more than one, each with a GPU of its own."""
    if machine.num_gpus < 2:
        pytest.skip("one GPU here: NCCL wants a GPU for each rank")
    return min(4, machine.num_gpus)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def record(machine: Machine, corpus: Corpus, request: pytest.FixtureRequest) -> Record:
    """Keep a number with everything that belongs to it: record(measured(…), precision="bf16")."""
    store = Store(recorded_folder() / "gpu.jsonl")

    def keep(*quantities: Quantity, world_size: int = 1, **tags: object) -> None:
        manifest = RunManifest.collect(
            dataset_sha256=corpus.sha256,
            tokenizer_sha256=corpus.tokenizer_sha256,
            config={"machine": asdict(machine), **tags},
            strategy=str(tags.get("strategy", "one process")),
            world_size=world_size,
            seed=0,
            hardware=describe(),
        )
        for quantity in quantities:
            store.add(quantity, manifest, test=request.node.name, world_size=world_size, **tags)

    return keep
