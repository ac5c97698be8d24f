"""What is left of a run when it ends: weights, optimizer, step, and what was run.

    final.pt = {model, optimizer, config, manifest, step}: tensors and plain values, nothing to run

    save_final("runs/7", model_state=full_state_dict(model), optimizer_state=…, config=…, step=100)
    load_final("runs/7").step               # 100

One file, written under another name and moved into place: it is whole or it is not there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "final.pt"
_PLAIN = (Tensor, str, int, float, bool, type(None))


@dataclass(frozen=True, eq=False)
class FinalCheckpoint:
    """What `save_final` kept; tensors on the CPU."""

    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    config: dict[str, Any]
    manifest: dict[str, Any]
    step: int
    """Optimizer steps taken."""


def save_final(
    folder: str | Path,
    *,
    model_state: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
    step: int,
) -> Path:
    """Write `folder`/final.pt, on one rank. ValueError for what `load_final` could not read."""
    content = {
        "model_state": dict(model_state),
        "optimizer_state": dict(optimizer_state),
        "config": dict(config),
        "manifest": dict(manifest),
        "step": step,
    }
    _check_plain(content, "checkpoint")
    file = Path(folder).expanduser() / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as draft:
        try:
            torch.save(content, draft)
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, file)
        except BaseException:
            os.unlink(draft.name)
            raise
    return file


def load_final(folder: str | Path) -> FinalCheckpoint:
    """Read it again, without running anything in it. ValueError when there is no checkpoint."""
    file = Path(folder).expanduser() / FILE
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        return FinalCheckpoint(**content)
    except FileNotFoundError:
        problem = "is missing"
    except Exception:  # a damaged file may raise anything: pickle, zip, type, end of file
        problem = "is damaged or no checkpoint"
    raise ValueError(f"{str(file)!r} {problem}; name a folder that save_final wrote")


def _check_plain(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"key {key!r} of {name}")
            _check_plain(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{name}[{i}]")
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, words, "
            f"lists and dicts, for example dataclasses.asdict(config)"
        )
