"""How is one model trained, on one rank or many, so that its numbers can be trusted?

    from labsupport.train import build_optimizer, train_step
    result = train_step(model, build_optimizer(model, config), micro_batches, config=config, step=0)
    result.loss, result.grad_norm           # of the global batch, the same on every rank

In one process `train_step` is the oracle that every parallel strategy is compared with.
`python -m labsupport.train --help` tells the command line. Nothing here loads torch until used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.train.loop import StepRecord as StepRecord
    from labsupport.train.loop import train as train
    from labsupport.train.optimizer import build_optimizer as build_optimizer
    from labsupport.train.step import StepResult as StepResult
    from labsupport.train.step import train_step as train_step

_HOME = {
    "StepRecord": "loop",
    "StepResult": "step",
    "build_optimizer": "optimizer",
    "train": "loop",
    "train_step": "step",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"labsupport.train.{_HOME[name]}"), name)
    raise AttributeError(f"module 'labsupport.train' has no attribute {name!r}")
