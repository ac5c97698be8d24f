"""In which order is a model made ready for a strategy, precision and recomputation?

weights (seed or folder) -> precision -> device -> recomputation -> compile
                                                      -> DDP or FSDP -> optimizer

model = build_model(ModelConfig.named("tiny"), config, precision=Precision.named("bf16"))
model = distribute(model, ParallelConfig(data_parallel_size=2), precision=precision)
optimizer = build_optimizer(model, config)      # last: it must hold the final parameters
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig
from labsupport.model import Llama
from labsupport.parallel.activation_checkpointing import checkpoint_activations
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.train.precision import Precision


def build_model(
    model_config: ModelConfig,
    config: TrainConfig,
    *,
    precision: Precision,
    device: torch.device | str = "cpu",
    weights: Mapping[str, Tensor] | None = None,
    compiled: bool = False,
) -> Llama:
    """A model on one rank: weights of `config.seed`, or those given, ready to be distributed.

    Raises ValueError where the recomputation cannot be had on `device` or `weights` do not fit.
    """
    model = Llama(model_config, seed=config.seed, dropout=config.dropout)
    if weights is not None:
        try:
            loaded = Llama.from_hf_state_dict(model_config, weights)
        except RuntimeError as error:  # torch's list of what is missing or of another shape
            raise ValueError(f"the weights do not fit the model; {error}") from None
        model.load_state_dict(loaded.state_dict())
    precision.prepare(model)
    model.to(device)
    checkpoint_activations(model, config.recompute)
    if compiled:
        for block in model.model.layers:  # one by one: they are alike, and FSDP wraps each
            block.compile()
    return model


def distribute(model: Llama, parallel: ParallelConfig, *, precision: Precision) -> nn.Module:
    """Wrap or shard the model over all ranks; one rank of ddp needs nothing."""
    if parallel.data_parallel_sharding == "fsdp":
        fully_sharded(model, compute_dtype=precision.compute_dtype)  # in place
        return model
    return data_parallel(model) if parallel.data_parallel_size > 1 else model
