"""Does the prediction of training memory hold against the allocator of a GPU?

The tracker counts the bytes of tensors; the allocator rounds them up and keeps workspaces, so it
says somewhat more. Both are recorded, with the prediction beside them.
"""

from __future__ import annotations

from statistics import median

import pytest
import torch
from conftest import Machine, Record

from labsupport.config import Recompute, TrainConfig
from labsupport.data import Corpus
from labsupport.measure.memory import MemoryTracker
from labsupport.plan import training_memory
from labsupport.results import measured, predicted
from labsupport.train import build_optimizer, train_step
from labsupport.train.precision import Precision
from labsupport.train.proof_run import build

CASES = [
    (precision, recompute)
    for precision in ("fp32", "bf16", "bf16-pure")
    for recompute in ("none", "full", "selective")
]
MICRO_BATCH = 4


def test_prediction_against_tracker_and_allocator(
    machine: Machine, corpus: Corpus, record: Record
) -> None:
    errors = {case: error_of(machine, corpus, record, *case) for case in CASES}
    assert median(errors.values()) <= 0.05, errors
    assert max(errors.values()) <= 0.15, errors


def error_of(
    machine: Machine, corpus: Corpus, record: Record, precision_name: str, recompute: str
) -> float:
    """Share by which the predicted peak of the second step misses the tracker's."""
    config = TrainConfig(
        micro_batch_size=MICRO_BATCH,
        seq_len=machine.seq_len,
        steps=2,
        mixed_precision=precision_name,
        activation_checkpointing=recompute,
    )
    precision = Precision.named(precision_name, device=machine.device)
    if machine.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if machine.device == "cuda" else 0
    model = build(machine.model, config, seed=0, device=machine.device)
    optimizer = build_optimizer(model, config)
    with MemoryTracker(model, optimizer) as memory:
        for step in range(config.steps):
            batch = corpus.batch(step, seq_len=config.seq_len, global_batch_size=MICRO_BATCH)
            train_step(model, optimizer, [batch], config=config, step=step, precision=precision)
    tracked = memory.timeline().peak(step=2).total_bytes
    expected = training_memory(
        machine.model,
        micro_batch_size=MICRO_BATCH,
        seq_len=machine.seq_len,
        precision=precision_name,
        recompute=Recompute.parse(recompute),
    ).peak_bytes
    name, tags = "peak memory", {"precision": precision_name, "recompute": recompute}
    tags |= {"model": machine.model_name, "batch": MICRO_BATCH, "seq_len": machine.seq_len}
    record(
        measured(name, tracked, "bytes", on=f"tensors counted on {machine.device}"),
        predicted(name, expected, "bytes", by="labsupport.plan.training_memory"),
        **tags,
    )
    if machine.device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
        record(measured(f"{name}, allocator", peak, "bytes", on="torch.cuda allocator"), **tags)
        assert peak == pytest.approx(tracked, rel=0.10)
    return abs(expected / tracked - 1)
