"""What does a run show while it goes: a line a step, an object a step, a bar?

    step     3  loss 7.4933  lr 3.0e-03  |g| 3.896  12,345 tokens/s  process RSS 412 MiB
    {"step": 3, "loss": 7.4933, "grad_norm": 3.896, "lr": 0.003, "tokens_per_second": 12345.6, …}

    with Report(request, speed=speed, metrics_file=Path("metrics.jsonl")) as report:
        for record in train(…):
            report.show(record)
        report.closing({"run_dir": "runs/1"})

The bar is for a terminal only, below the lines. The metrics file gets the objects of all steps.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from labsupport.results import format_value
from labsupport.train.loop import StepRecord, skip_reason
from labsupport.train.request import Request
from labsupport.train.speed import Speed


class Report:
    """What rank 0 says on stdout, keeps in `metrics_file`, and draws on stderr."""

    def __init__(self, request: Request, *, speed: Speed, metrics_file: Path) -> None:
        self._request = request
        self._speed = speed
        self._metrics: IO[str] = metrics_file.open("w")
        self._records: list[StepRecord] = []
        self._bar: Any = None
        if not request.json and sys.stdout.isatty() and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=request.config.steps, unit=" steps", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The file is whole, and the bar stays as it is."""
        self._metrics.close()
        if self._bar is not None:
            self._bar.close()

    def opening(self, *, on: str) -> None:
        """Who trains what, how, and on what."""
        if not self._request.json:
            self._say(opening_line(self._request, on=on))

    def show(self, record: StepRecord) -> None:
        """One step: to the file always, to the screen every `log_every` steps and when skipped."""
        self._records.append(record)
        row = step_row(record, self._speed)
        line = json.dumps(row)
        self._metrics.write(line + "\n")
        if record.result.skipped or record.step % self._request.log_every == 0:
            self._say(line if self._request.json else step_line(record, mfu=row["mfu"]))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {record.result.loss:.4g}", refresh=False)
            self._bar.update()

    def closing(self, written: Mapping[str, str]) -> None:
        """How the run went, and where its files are."""
        row = done_row(self._records, self._speed) | dict(written)
        self._say(json.dumps(row) if self._request.json else done_line(row, written))

    def _say(self, line: str) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)  # above the bar


def opening_line(request: Request, *, on: str) -> str:
    """As in "tiny, 1,311,872 parameters: ddp × 2, fp32, batch 8 × 1 × 2 = 16 …"."""
    config, parallel = request.config, request.parallel
    size, accumulate = config.micro_batch_size, config.gradient_accumulation_steps
    ranks, together = parallel.data_parallel_size, config.global_batch_size(parallel)
    recompute = f"recompute {config.recompute}, " if str(config.recompute) != "none" else ""
    return (
        f"{request.model_name}, {request.model.num_params:,} parameters: {request.strategy}, "
        f"{config.mixed_precision}, {recompute}batch {size} × {accumulate} × {ranks} = "
        f"{together} sequences of {config.seq_len} tokens; {on}"
    )


def step_row(record: StepRecord, speed: Speed) -> dict[str, Any]:
    """A record as JSON: what is not finite becomes null, for JSON has no NaN."""
    result = record.result
    return {
        "step": record.step,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": result.learning_rate,
        "tokens_per_second": record.tokens_per_second,
        "tokens": result.num_tokens,
        "seconds": record.seconds,
        **speed.shares(record.tokens_per_second),
        "memory_bytes": record.memory_bytes,
        "memory_of": record.memory_of,
        "loss_scale": result.loss_scale,
        "skipped": result.skipped,
        "nonfinite_ranks": list(result.nonfinite_ranks),
    }


def step_line(record: StepRecord, *, mfu: float | None) -> str:
    """A record for people."""
    result = record.result
    parts = [
        f"step {record.step:>5}",
        f"loss {result.loss:.4f}",
        f"lr {result.learning_rate:.2e}",
        f"|g| {result.grad_norm:.3f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        *([] if mfu is None else [f"MFU {mfu:.1%}"]),
        f"{record.memory_of} {format_value(record.memory_bytes, 'bytes')}",
    ]
    if result.skipped:
        parts.append(f"skipped: {skip_reason(result)}")
    if result.loss_scale != 1:
        parts.append(f"loss scale {result.loss_scale:g}")
    return "  ".join(parts)


def done_row(records: Sequence[StepRecord], speed: Speed) -> dict[str, Any]:
    """The last object of a run. Its speed is the median; the first step, a warm-up, left out."""
    median = statistics.median(record.tokens_per_second for record in records[1:] or records)
    return {
        "done": True,
        "steps": len(records),
        "loss": _finite(records[-1].result.loss),
        "tokens": sum(record.result.num_tokens for record in records),
        "skipped_steps": sum(record.result.skipped for record in records),
        "seconds": sum(record.seconds for record in records),
        "tokens_per_second": median,
        **speed.shares(median),
        "memory_bytes": max(record.memory_bytes for record in records),
        "memory_of": records[-1].memory_of,
    }


def done_line(row: Mapping[str, Any], written: Mapping[str, str]) -> str:
    """The same for people."""
    files = ", ".join(f"{name} {path}" for name, path in written.items())
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    return (
        f"done: {row['steps']} steps in {format_value(row['seconds'], 's')}, "
        f"{row['tokens_per_second']:,.0f} tokens/s (median), loss {loss}; {files}"
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
