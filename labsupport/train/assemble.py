"""In which order is a model made ready for a strategy, precision and recomputation?

weights (seed or folder) -> precision -> device -> recomputation, compile (done when it runs)
                                                -> TP, CP -> DDP, ZeRO or FSDP -> optimizer

model = build_model(ModelConfig.named("tiny"), config, precision=precision)
parallel = ParallelConfig(data_parallel_size=2, data_parallel_sharding="fsdp")
model = distribute(model, parallel, layout=Layout.build(parallel), precision=precision)
optimizer = build_optimizer(model, config)      # last: it must hold the final parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig
from labsupport.model import Llama
from labsupport.parallel.activation_checkpointing import checkpoint_activations
from labsupport.parallel.context import context_parallel
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.layout import Layout
from labsupport.parallel.meta_init import init_shards
from labsupport.parallel.tensor import tensor_parallel
from labsupport.parallel.zero import zero1, zero2
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

    On `device` "meta" it has shapes only, and gets its weights from `distribute`.
    Raises ValueError where the recomputation cannot be had on `device` or `weights` do not fit.
    """
    with torch.device("meta") if str(device) == "meta" else nullcontext():
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


def distribute(
    model: Llama,
    parallel: ParallelConfig,
    *,
    layout: Layout,
    precision: Precision,
    seed: int = 0,
) -> nn.Module:
    """Split and wrap the model over the axes of `layout`; one rank of ddp needs nothing.

    Under fsdp and hsdp it may be on the meta device: the shards are then drawn from `seed`.
    """
    mesh = layout.mesh
    if mesh is None:
        return model
    if layout.tp_size > 1:
        tensor_parallel(model, mesh["tp"], sequence_parallel=layout.sequence_parallel)
    if layout.cp_size > 1:
        context_parallel(model, mesh["cp"])
    sharding = parallel.data_parallel_sharding
    if sharding in ("zero1", "zero2"):
        shard = zero1 if sharding == "zero1" else zero2
        return shard(model, layout.loss_mesh)
    if sharding in ("fsdp", "hsdp"):
        fully_sharded(model, mesh=layout.fsdp_mesh, compute_dtype=precision.compute_dtype)
        if next(model.parameters()).is_meta:
            init_shards(model, seed=seed)
        return model
    if layout.loss_mesh.size() == 1:
        return model
    if layout.tp_size == 1:
        return data_parallel(model, group=layout.loss_group)
    # DDP takes no DTensor. Shards of size 1/1, copied over all data-parallel ranks, are the same.
    fully_sharded(model, mesh=layout.ddp_mesh)
    return model
