"""What does a command line ask for, and can it be done?

    request = read_request(["--model", "tiny", "--batch-size", "8"], world_size=2)
    request.config.micro_batch_size, request.parallel.data_parallel_size      # (8, 2)
    read_request(["--seq-len", "4096"])       # ValueError: the value, the rule, a value that works

Everything that can be refused without torch is refused here, so that it takes a blink.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig, check_fits
from labsupport.config.rules import require
from labsupport.train.arguments import build_parser
from labsupport.train.pairs import check_pairs


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that can be tried: every setting checked as far as that goes without torch."""

    model_name: str
    model: ModelConfig
    weights: Path | None
    """Hugging Face folder that the weights and the tokenizer come from; None: from the seed."""
    config: TrainConfig
    parallel: ParallelConfig
    data: Path | None
    """Text file; None: Python's documentation."""
    device: str
    compile: bool
    run_dir: Path | None
    checkpoint_dir: Path | None
    export_hf: Path | None
    log_every: int
    json: bool

    @property
    def strategy(self) -> str:
        """As in the manifest: "fsdp × 2", or "hsdp 2×2 · tp 2 · cp 1"."""
        parallel = self.parallel
        mesh, tp = parallel.mesh, parallel.tensor_parallel_size
        words = f"{parallel.data_parallel_sharding} × {parallel.data_parallel_size}"
        if parallel.data_parallel_sharding == "hsdp":
            words = f"hsdp {mesh['dp_replicate']}×{mesh['dp_shard']}"
        if tp == mesh["cp"] == 1:
            return words
        return f"{words} · tp {tp}{' + sp' * parallel.sequence_parallel} · cp {mesh['cp']}"


def read_request(
    argv: Sequence[str] | None = None, *, world_size: int = 1, num_nodes: int = 1
) -> Request:
    """Parse and check; ValueError in the words of the command line."""
    given = build_parser().parse_args(argv)
    try:
        return _checked(given, world_size, num_nodes)
    except ValueError as error:
        raise ValueError(in_options(str(error))) from None


def in_options(message: str) -> str:
    """Settings named as the user typed them: `micro_batch_size=0` becomes `--batch-size=0`."""
    settings = [*TrainConfig.__dataclass_fields__, *ParallelConfig.__dataclass_fields__]
    names = "|".join([*settings, "global_batch_size", "log_every"])

    def option(match: re.Match[str]) -> str:
        return "--" + match[0].removeprefix("micro_").replace("_", "-")

    return re.sub(rf"(?<![-\w])({names})(?==)", option, message)


def _checked(given: argparse.Namespace, world_size: int, num_nodes: int) -> Request:
    parallel = _parallel(given, world_size, num_nodes)
    config = _train_config(given, parallel)
    model, weights = _model(given.model)
    longest = model.max_seq_len
    rule = f"is longer than {longest}, the longest that model {given.model!r} takes"
    require(config.seq_len <= longest, "seq_len", config.seq_len, rule, longest)
    check_fits(model, parallel, seq_len=config.seq_len)
    check_pairs(config, parallel, compiled=given.compile)
    require(given.log_every >= 1, "log_every", given.log_every, "must be at least 1", 1)
    if given.data is not None:
        from labsupport.corpus import read_text

        read_text(given.data)
    return Request(
        model_name=given.model,
        model=model,
        weights=weights,
        config=config,
        parallel=parallel,
        data=given.data,
        device=given.device,
        compile=given.compile,
        run_dir=given.run_dir,
        checkpoint_dir=given.checkpoint_dir,
        export_hf=given.export_hf,
        log_every=given.log_every,
        json=given.json,
    )


def _parallel(given: argparse.Namespace, world_size: int, num_nodes: int) -> ParallelConfig:
    sizes = {f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "context")}
    split = {name: getattr(given, name) for name in sorted(sizes)}
    for name, value in split.items():
        require(value >= 1, name, value, "must be at least 1", 1)
    require(
        given.pipeline_parallel_size == 1,
        "pipeline_parallel_size",
        given.pipeline_parallel_size,
        "is not built yet; split the layers with tensor_parallel_size",
        1,
    )
    sharding, replicas = given.data_parallel_sharding, given.data_parallel_replicate_size
    if replicas is None:
        replicas = 1
        if sharding == "hsdp":
            ranks = world_size // math.prod(split.values())
            fine = (n for n in (num_nodes, 2) if n > 1 and ranks % n == 0)
            replicas = next(fine, 1)
    return ParallelConfig.for_world_size(
        world_size,
        data_parallel_sharding=sharding,
        data_parallel_replicate_size=replicas,
        sequence_parallel=given.sequence_parallel,
        **split,
    )


def _train_config(given: argparse.Namespace, parallel: ParallelConfig) -> TrainConfig:
    names = set(TrainConfig.__dataclass_fields__) & set(vars(given))
    settings = {name: getattr(given, name) for name in names}
    config = TrainConfig(micro_batch_size=given.batch_size, **settings)
    total = given.global_batch_size
    if total is None:
        return config
    together = config.global_batch_size(parallel)
    rule = (
        f"must be a multiple of {together} ({config.micro_batch_size} sequences × "
        f"{parallel.data_parallel_size} data-parallel ranks)"
    )
    works = max(1, total // together) * together
    require(total >= 1 and total % together == 0, "global_batch_size", total, rule, works)
    return replace(config, gradient_accumulation_steps=total // together)


def _model(name: str) -> tuple[ModelConfig, Path | None]:
    """A named shape, or the shape in a folder's config.json."""
    folder = Path(os.path.expanduser(name))
    if not os.path.isdir(folder):  # as Path.is_dir, but no error for a name that cannot be one
        try:
            return ModelConfig.named(name), None
        except ValueError as error:
            raise ValueError(f"{error}, or give a Hugging Face folder") from None
    try:
        return ModelConfig.from_hf(json.loads((folder / "config.json").read_text())), folder
    except OSError as error:
        reason = f"has no readable config.json ({error.strerror})"
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"holds no Llama that can be built here ({error})"
    raise ValueError(f"model folder {name!r} {reason}; give another one, or 'tiny'")
