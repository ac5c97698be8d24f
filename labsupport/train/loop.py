"""How does a run go from step to step, and what does it say about each?

    batch s of rank r   follows from (seed, s, r)          no position to keep, so any step can be
    tokens/s            valid tokens of all ranks / seconds from one step to the next
    MFU                 tokens/s · FLOPs per token / peak FLOP/s of all ranks' devices

    for record in train(model, optimizer, load_corpus(), config):
        print(record.step, record.loss, record.tokens_per_second)

`train` does what the command line does, in a notebook or on a rank of a pool (pass `group`, or
`layout` where there is more than data parallelism).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from labsupport.config import TrainConfig
from labsupport.data import Corpus
from labsupport.parallel.layout import Layout
from labsupport.train.precision import Precision
from labsupport.train.step import Group, StepResult, train_step

MAX_SKIPPED_IN_A_ROW = 10
"""A GradScaler needs a few skips to find its scale; a model that got NaN never recovers."""


class TrainingDivergedError(RuntimeError):
    """Step after step was skipped, since loss or gradient was not finite."""


@dataclass(frozen=True)
class StepRecord:
    """One step, measured. The result is the same on every rank; time and memory are this rank's."""

    step: int
    result: StepResult
    seconds: float
    """Since the step before, the batch included; the first step also warms everything up."""
    memory_bytes: int
    memory_of: str
    """What `memory_bytes` is: "CUDA peak" (most allocated since the start) or "process RSS"."""

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens of the global batch per second."""
        return self.result.num_tokens / self.seconds


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    config: TrainConfig,
    *,
    precision: Precision | None = None,
    group: Group | None = None,
    layout: Layout | None = None,
) -> Iterator[StepRecord]:
    """Train for `config.steps` steps, giving a record after each.

    With a `group`, this is one of its data-parallel ranks and `model` averages gradients over it;
    with a `layout` in place of it, ranks of one tensor- or context-parallel group get one batch.
    The time that the caller takes between two records is not counted.
    Raises ValueError for a text with fewer samples than one global batch, and
    TrainingDivergedError, on all ranks, after 10 skipped steps in a row.
    """
    place = Layout.of_group(group) if layout is None else layout
    accumulate = config.gradient_accumulation_steps
    memory = memory_meter(next(model.parameters()).device)
    scaler = precision.grad_scaler() if precision is not None else None
    skipped_in_a_row = 0
    model.train()
    for step in range(config.steps):
        start = time.perf_counter()
        batch = corpus.batch(
            step,
            seq_len=config.seq_len,
            global_batch_size=config.micro_batch_size * accumulate * place.dp_size,
            rank=place.dp_rank,
            world_size=place.dp_size,
            seed=config.seed,
        )
        result = train_step(
            model,
            optimizer,
            batch.micro_batches(accumulate),
            config=config,
            step=step,
            precision=precision,
            scaler=scaler,
            layout=place,
        )
        yield StepRecord(step, result, time.perf_counter() - start, *memory())
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise TrainingDivergedError(
                f"step {step}: {skipped_in_a_row} steps in a row were skipped, "
                f"{skip_reason(result)}; a lower learning rate, or bf16 in place of fp16, may help"
            )


def skip_reason(result: StepResult) -> str:
    """What was not finite, and where."""
    if not result.nonfinite_ranks:
        return "the gradient was not finite though every rank's loss was"
    ranks = ", ".join(map(str, result.nonfinite_ranks))
    return f"the loss was not finite on rank{'s' * (len(result.nonfinite_ranks) > 1)} {ranks}"


def memory_meter(device: torch.device) -> Callable[[], tuple[int, str]]:
    """A function that tells (bytes, what they are) of this process on `device`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: (torch.cuda.max_memory_allocated(device), "CUDA peak")
    process = psutil.Process()
    return lambda: (process.memory_info().rss, "process RSS")
