"""What does DeepSpeed want to know to train the same model? One JSON file.

    stage 1: optimizer state / N      2: and gradients / N      3: and parameters / N
    offload: what is divided lies in the memory of the host, and the update is done there

    settings = deepspeed_config(3, config=TrainConfig(), offload_optimizer=True)
    engine = deepspeed_engine(Llama(model_config), settings)     # on every rank
    engine.backward(loss); engine.step()            # an engine is model and optimizer in one

DeepSpeed is optional: `make deepspeed` puts it into an environment of its own, beside .venv, whose
packages are found from here too. This is the only module that imports it.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from labsupport.config import TrainConfig

Stage = Literal[1, 2, 3]
MISSING = "DeepSpeed is not installed here; `make deepspeed` adds it, in an environment of its own"
_ENVIRONMENT = Path(__file__).parents[2] / ".venv-deepspeed"
# How DeepSpeed 0.19.8 names what its optimizer holds: stages 1 and 2, with offload over several
# micro batches and over one, stage 3.
_GRADIENTS = (
    *("averaged_gradients", "accumulated_grads_in_cpu", "offload_gradient_dict"),
    "grad_partitions_flat_buffer",
)
_MASTER = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


def is_installed() -> bool:
    """Did `make deepspeed` run here?"""
    return packages() is not None


def packages() -> Path | None:
    """Where its environment keeps DeepSpeed and what comes with it; None where it is missing."""
    found = next(iter(_ENVIRONMENT.glob("lib/python*/site-packages/deepspeed")), None)
    return None if found is None else found.parent


def deepspeed_config(
    stage: Stage,
    *,
    config: TrainConfig,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    bucket_numel: int = 500_000,
) -> dict[str, Any]:
    """The JSON file for a run of `config`: `json.dumps` of it is what users write by hand.

    `bucket_numel` numbers are exchanged at a time. DeepSpeed's own choice, 500 million, is for
    large GPUs: stage 3 sets 2 GB aside for it. Raises ValueError for what it cannot honour.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"{stage=} is unknown; ZeRO has the stages 1, 2 and 3")
    if offload_parameters and stage != 3:
        raise ValueError(f"offload_parameters needs stage=3, not {stage}: only it divides them")
    if config.mixed_precision not in ("fp32", "bf16"):
        raise ValueError(
            f"mixed_precision={config.mixed_precision!r} is not set up here; use 'fp32' or 'bf16'"
        )
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket_numel,
        "allgather_bucket_size": bucket_numel,
    }
    if stage == 3:
        # Free a weight as soon as it was used, and divide small ones too: what fully_shard does.
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 0
        zero["stage3_prefetch_bucket_size"] = zero["stage3_param_persistence_threshold"] = 0
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.grad_clip or 0.0,
        "bf16": {"enabled": config.mixed_precision == "bf16"},
        "optimizer": _optimizer(config),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # SGD; any class that works number by number is fine
        "steps_per_print": 10**9,
    }


def _optimizer(config: TrainConfig) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return {"type": "SGD", "params": params | {"momentum": config.momentum}}
    # torch's own AdamW: DeepSpeed's needs a compiler, and with offload one for the host.
    params |= {"betas": list(config.adam_betas), "eps": config.adam_eps, "torch_adam": True}
    return {"type": "AdamW", "params": params}


def deepspeed_engine(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    """DeepSpeed's engine around `model`, from rank 0's weights; every rank must call it.

    As in `build_optimizer`, vectors do not decay. Call `engine.destroy()` when done: the hooks of
    stage 3 stay in `model` otherwise. Raises ImportError where DeepSpeed is not installed.
    """
    deepspeed = _load(next(model.parameters()).device)
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim > 1]},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # Rank 0 sends its weights to all: 4 bytes a parameter, 2 in bf16.
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=dict(settings), dist_init_required=False
    )
    return engine


def full_parameters(engine: Any) -> dict[str, Tensor]:
    """Copies of the whole fp32 weights by name, on every rank; every rank must call it."""
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-not-found]

    # Each rank sends its part of one parameter after the other: 4 bytes a parameter in all.
    named = engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(param).detach().clone() for name, param in named}


def held_tensors(engine: Any) -> dict[str, list[Tensor]]:
    """What this rank holds of the states, by category; a tensor may stand in more than one.

    "master" is the fp32 part of the weights that the optimizer changes: DeepSpeed keeps it beside
    the weights that the model computes with, in fp32 training too. "other" is what it needs for
    itself: buckets that gradients travel in, their copy for the update, staging on the host.
    """
    zero, params = engine.optimizer, list(engine.module.parameters())
    master = [param for group in zero.optimizer.param_groups for param in group["params"]]
    held: dict[str, Any] = {
        "parameters": [*params, [getattr(param, "ds_tensor", None) for param in params]],
        "gradients": [[param.grad for param in params], _first(zero, _GRADIENTS)],
        "master": [master, _first(zero, _MASTER)],
        "optimizer": list(zero.optimizer.state.values()),
        "other": [[param.grad for param in master], vars(zero)],
    }
    return {name: list(_tensors(values, set())) for name, values in held.items()}


def _first(owner: Any, names: Iterable[str]) -> list[Tensor]:
    """Tensors of the first attribute that has any."""
    found = (list(_tensors(getattr(owner, name, None), set())) for name in names)
    return next((tensors for tensors in found if tensors), [])


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Every tensor in nested containers and in DeepSpeed's own small records."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield value
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif type(value).__module__.startswith("deepspeed."):
        inside = getattr(value, "__dict__", {}).values()
    for item in inside:
        yield from _tensors(item, visited)


def _load(device: torch.device) -> Any:
    """Import DeepSpeed, for this device, from its environment, and keep it quiet."""
    folder = packages()
    if folder is None:
        raise ImportError(MISSING)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end: what .venv has comes from there
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, at the import
    # It calls collectives by their names of yesterday, and torch tells so at every place.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed  # type: ignore[import-not-found]

    # None of its own operators is compiled: for what runs here, torch has them all.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
