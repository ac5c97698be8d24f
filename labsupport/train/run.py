"""What happens between a request that can be tried and the last line of its run?

    ranks meet -> the model is spread -> optimizer -> steps -> checkpoint, export

    run(prepare(read_request(["--steps", "5"])))

Every rank does the same work; rank 0 alone speaks and writes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labsupport.checkpoint import (
    export_hf,
    full_optimizer_state_dict,
    full_state_dict,
    save_final,
)
from labsupport.devices import describe
from labsupport.parallel.layout import Layout
from labsupport.results import RunManifest
from labsupport.train.assemble import distribute
from labsupport.train.loop import train
from labsupport.train.optimizer import build_optimizer
from labsupport.train.prepare import Prepared
from labsupport.train.report import Report
from labsupport.train.speed import speed_of

COLLECTIVE_TIMEOUT_S = 600.0
MANIFEST, METRICS = "manifest.json", "metrics.jsonl"


def run(prepared: Prepared) -> None:
    """Train to the end and write what was asked for. Every rank calls it."""
    request, config = prepared.request, prepared.request.config
    with layout_of(prepared) as layout:
        precision = prepared.precision
        model = distribute(
            prepared.model, request.parallel, layout=layout, precision=precision, seed=config.seed
        )
        optimizer = build_optimizer(model, config)
        records = train(
            model, optimizer, prepared.corpus, config, precision=precision, layout=layout
        )
        if prepared.rank != 0:
            deque(records, maxlen=0)
            save(prepared, model, optimizer)
            return
        manifest = manifest_of(prepared)
        manifest.write(prepared.run_dir / MANIFEST)
        size = request.parallel.world_size
        speed = speed_of(request.model, config, device=prepared.device, world_size=size)
        with Report(request, speed=speed, metrics_file=prepared.run_dir / METRICS) as report:
            report.opening(on=manifest.hardware)
            for record in records:
                report.show(record)
            written = save(prepared, model, optimizer, manifest)
            report.closing({"run_dir": str(prepared.run_dir), **written})


@contextmanager
def layout_of(prepared: Prepared) -> Iterator[Layout]:
    """Meet the other ranks, and leave them at the end; one process that shards nothing has none."""
    is_launched = "WORLD_SIZE" in os.environ
    parallel = prepared.request.parallel
    if not is_launched and parallel.data_parallel_sharding == "ddp":
        yield Layout()
        return
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(
        prepared.backend,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=prepared.device if prepared.backend == "nccl" else None,
        **({} if is_launched else alone),
    )
    try:
        yield Layout.build(parallel, device_type=prepared.device.type)
    finally:
        dist.destroy_process_group()


def manifest_of(prepared: Prepared) -> RunManifest:
    """What has to be the same for this run to be the same."""
    request = prepared.request
    ranks = request.parallel.world_size
    on_cpu = f"ranks × threads: {ranks} × {torch.get_num_threads()}"
    share = on_cpu if prepared.device.type == "cpu" else f"ranks, each on a GPU: {ranks}"
    return RunManifest.collect(
        dataset_sha256=prepared.corpus.sha256,
        tokenizer_sha256=prepared.corpus.tokenizer_sha256,
        config={
            "model_name": request.model_name,
            "model": asdict(request.model),
            "train": asdict(request.config),
            "parallel": asdict(request.parallel),
            "data": prepared.corpus.name,
            "compile": request.compile,
        },
        strategy=request.strategy,
        world_size=ranks,
        seed=request.config.seed,
        hardware=f"{describe()}; {share}",
    )


def save(
    prepared: Prepared,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: RunManifest | None = None,
) -> dict[str, str]:
    """Write checkpoint and export, where asked for; every rank gives its shards to rank 0.

    Rank 0 has the manifest, and writes.
    """
    request, corpus = prepared.request, prepared.corpus
    written: dict[str, str] = {}
    if request.checkpoint_dir is None and request.export_hf is None:
        return written
    weights = full_state_dict(model)
    if request.checkpoint_dir is not None:
        moments = full_optimizer_state_dict(model, optimizer)
        if manifest is not None:
            folder = request.checkpoint_dir.expanduser()
            manifest.write(folder / MANIFEST)
            written["checkpoint"] = str(
                save_final(
                    folder,
                    model_state=weights,
                    optimizer_state=moments,
                    config=asdict(request.model),
                    manifest=manifest.to_dict(),
                    step=request.config.steps,
                )
            )
    if request.export_hf is not None and manifest is not None:
        folder = export_hf(
            weights,
            request.model,
            corpus.tokenizer,
            request.export_hf,
            bos_token=corpus.bos_token,
            eos_token=corpus.eos_token,
        )
        manifest.write(folder / MANIFEST)
        written["export_hf"] = str(folder)
    return written
