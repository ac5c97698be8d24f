"""Which activations of a block are forgotten after its forward pass, to be computed again?

    none        forward keeps everything        backward reads it
    full        forward keeps the block's input backward runs the block again, then reads
    selective   ... and what was costly          backward runs again only what is cheap
    offload     forward moves it to host memory backward fetches it

    model = checkpoint_activations(Llama(config), Recompute(mode="full", every=2))
    model(input_ids)                        # same numbers, same gradients, same parameter names
    checkpoint_activations(model, Recompute())                          # and off again

"Checkpoint" is autograd's word for a kept input from which a stretch is computed again; it has
nothing to do with files. Only the blocks' `forward` is exchanged: modules, parameters and state
dict keep their names. Call it before any wrapper (DDP, fully_shard) and before torch.compile.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labsupport.config import Recompute
from labsupport.parallel.context.ring import RING_FORWARD
from labsupport.parallel.offload import run_with_host_copies

Model = TypeVar("Model", bound=nn.Module)

aten = torch.ops.aten
MATMULS: frozenset[OpOverload] = frozenset(
    {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}
)
"""What nn.Linear becomes (`_scaled_mm` in fp8): q, k, v, o, gate, up and down of a block."""
ATTENTION: frozenset[OpOverload] = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        RING_FORWARD,
    }
)
"""Fused on CPUs and GPUs, and round a ring of ranks; its result and a row of log-sums are kept."""
COSTLY: frozenset[OpOverload] = MATMULS | ATTENTION
"""What selective keeps: almost all FLOPs of a block. Norms, rotary and SwiGLU's product go."""


def checkpoint_activations(
    model: Model, recompute: Recompute, *, keep: Collection[OpOverload] = COSTLY
) -> Model:
    """Give the blocks of `model.model.layers` a forward that keeps less; returns `model`.

    A later call replaces an earlier one. Random numbers (dropout) and autocast are the same in
    both runs of a block. `keep` is for mode "selective": operators whose results are kept.
    Raises ValueError for a model without `model.layers`, and for offload where all is on the CPU.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no model.layers; give the Llama itself, before it is "
            f"wrapped, for example checkpoint_activations(Llama(config), recompute)"
        )
    if recompute.mode == "offload" and _is_on_cpu(model):
        raise ValueError(
            "activation_checkpointing='offload' moves activations from a GPU to host memory, and "
            "this model is in host memory already; use 'selective' or 'full', or move the model "
            "to a GPU first"
        )
    for index, block in enumerate(layers):
        vars(block).pop("forward", None)  # what an earlier call put there; the class has its own
        if recompute.mode == "full" and index % recompute.every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif recompute.mode == "selective":
            contexts = partial(create_selective_checkpoint_contexts, list(keep))
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=contexts
            )
        elif recompute.mode == "offload":
            block.forward = partial(run_with_host_copies, block.forward)
    return model


def _is_on_cpu(model: nn.Module) -> bool:
    return all(param.device.type == "cpu" for param in model.parameters())
