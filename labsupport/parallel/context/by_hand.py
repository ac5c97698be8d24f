"""Context parallelism: how do n ranks read one sequence that is too long for each of them?

    activations of a rank: 1/n of every layer's        weights: whole, on every rank
    only attention looks across tokens, so only attention talks

    model = context_parallel(Llama(config), mesh["cp"])
    model(shard_sequence(input_ids, rank, n), positions=zigzag_positions(seq_len, rank, n))

Every rank computes the loss of its own tokens; gradients of the weights are averaged over the group
like those of data parallelism (and over both together), by DDP or fully_shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labsupport.model import Block, Llama
from labsupport.parallel.context.ring import ring_attention
from labsupport.parallel.context.zigzag import Split, zigzag_chunks


def context_parallel(model: Llama, mesh: DeviceMesh, *, split: Split = zigzag_chunks) -> Llama:
    """Let every block attend round the ring of the 1-D `mesh`, in place; returns `model`.

    From here on `model` takes this rank's tokens, cut by the same `split`, and their positions.
    """
    attend = partial(ring_attention, group=mesh.get_group(), split=split)
    attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]  # messages: no graph
    for block in model.model.layers:
        cast(Block, block).self_attn.attend = attend
    if mesh.size() > 1:
        model.register_forward_pre_hook(_positions_are_given, with_kwargs=True)
    return model


def _positions_are_given(_: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
    """Left out they would be 0, 1, 2, … on every rank: a plausible loss of another text."""
    if kwargs.get("positions") is None:
        raise ValueError(
            "a context-parallel model needs the positions of this rank's tokens in the text, for "
            "example model(ids, positions=zigzag_positions(seq_len, rank, world_size))"
        )
