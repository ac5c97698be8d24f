"""What does a command line ask for, and can it be done?

    request = read_request(["--model", "tiny", "--batch-size", "8"], world_size=2)
    request.config.micro_batch_size, request.parallel.data_parallel_size      # (8, 2)
    read_request(["--seq-len", "4096"])       # ValueError: the value, the rule, a value that works

Everything that can be refused without torch is refused here, so that it takes a blink.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig
from labsupport.config.rules import require
from labsupport.train.arguments import build_parser

BUILT = ("ddp", "fsdp")


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
        """As in the manifest: "fsdp × 2"."""
        return f"{self.parallel.data_parallel_sharding} × {self.parallel.data_parallel_size}"


def read_request(argv: Sequence[str] | None = None, *, world_size: int = 1) -> Request:
    """Parse and check; ValueError in the words of the command line."""
    given = build_parser().parse_args(argv)
    try:
        return _checked(given, world_size)
    except ValueError as error:
        raise ValueError(in_options(str(error))) from None


def in_options(message: str) -> str:
    """Settings named as the user typed them: `micro_batch_size=0` becomes `--batch-size=0`."""
    settings = [*TrainConfig.__dataclass_fields__, *ParallelConfig.__dataclass_fields__]
    names = "|".join([*settings, "global_batch_size", "log_every"])

    def option(match: re.Match[str]) -> str:
        return "--" + match[0].removeprefix("micro_").replace("_", "-")

    return re.sub(rf"(?<![-\w])({names})(?==)", option, message)


def _checked(given: argparse.Namespace, world_size: int) -> Request:
    parallel = _parallel(given, world_size)
    config = _train_config(given, parallel)
    model, weights = _model(given.model)
    longest = model.max_seq_len
    rule = f"is longer than {longest}, the longest that model {given.model!r} takes"
    require(config.seq_len <= longest, "seq_len", config.seq_len, rule, longest)
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


def _parallel(given: argparse.Namespace, world_size: int) -> ParallelConfig:
    sharding = given.data_parallel_sharding
    if sharding not in BUILT:
        raise ValueError(f"data_parallel_sharding={sharding!r} is not built yet; use 'fsdp'")
    sizes = {f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "context")}
    for name in sorted(sizes):
        value = getattr(given, name)
        require(value >= 1, name, value, "must be at least 1", 1)
        require(value == 1, name, value, "is not built yet; all ranks are data-parallel", 1)
    return ParallelConfig.for_world_size(world_size, data_parallel_sharding=sharding)


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
