"""Tensor parallelism by hand: one model, of which every rank holds a slice of each layer.

    embedding ─g─► norm ─f─► q k v | attention | o ─g─► + norm ─f─► gate up | down ─g─► + … head

    model = tensor_parallel_by_hand(Llama(config), mesh)        # mesh: one axis, all its ranks
    model.loss(input_ids, labels).backward()                    # the same tokens on all ranks
    with loss_parallel():
        token_loss(model(input_ids), labels).sum.backward()     # or with torch's loss

Each block says four things in a step, of b·s·h numbers: g twice in forward, f twice in backward.
With `sequence_parallel` the stream between g and f is split by tokens, so that norms, residuals and
dropout are not done and kept n times over.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from labsupport.model import Block, Llama
from labsupport.parallel.agree import send_first_weights
from labsupport.parallel.tensor.functions import (
    copy_to_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sequence,
)
from labsupport.parallel.tensor.layers import (
    ParallelAttention,
    ParallelNorm,
    ParallelSwiGLU,
    VocabEmbedding,
    VocabLinear,
)
from labsupport.parallel.tensor.loss import split_token_loss
from labsupport.parallel.tensor.start import check_whole


def tensor_parallel_by_hand(
    model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> Llama:
    """Split `model` over the ranks of `mesh`, in place, from rank 0's weights; names stay.

    Logits come as a DTensor split by vocabulary. Raises ValueError for a model that does not divide
    by the number of ranks (`config.check_fits`), and for one that is wrapped or split already.
    """
    check_whole(model, mesh)
    send_first_weights(model, mesh.get_group())
    group = mesh.get_group()
    enter = partial(gather_sequence if sequence_parallel else copy_to_ranks, group=group)
    leave = partial(scatter_sequence if sequence_parallel else reduce_from_ranks, group=group)
    use = partial(copy_to_ranks, group=group) if sequence_parallel else _as_it_is
    whole = partial(ParallelNorm, mesh=mesh, use=use)

    decoder = model.model
    decoder.embed_tokens = VocabEmbedding(decoder.embed_tokens, mesh, leave=leave)
    for block in decoder.layers:
        assert isinstance(block, Block)
        block.input_layernorm = whole(block.input_layernorm)
        block.self_attn = ParallelAttention(block.self_attn, mesh, enter=enter, leave=leave)
        block.post_attention_layernorm = whole(block.post_attention_layernorm)
        block.mlp = ParallelSwiGLU(block.mlp, mesh, enter=enter, leave=leave)
    decoder.norm = whole(decoder.norm)
    model.lm_head = VocabLinear(model.lm_head, mesh, enter=enter)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = decoder.embed_tokens.weight
    model.token_loss = partial(split_token_loss, model)  # type: ignore[method-assign]
    return model


def _as_it_is(weight: Tensor) -> Tensor:
    return weight
