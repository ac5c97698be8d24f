"""Tensor parallelism as torch does it: a plan that names each layer's way of being split.

    q, k, v, gate, up, lm_head: ColwiseParallel      o, down, embedding: RowwiseParallel
    norms: SequenceParallel, or a copy on each rank

    model = tensor_parallel(Llama(config), mesh["tp"])
    with loss_parallel():                                       # F.cross_entropy on split logits
        token_loss(model(input_ids), labels).sum.backward()
    fully_shard(model, mesh=mesh["dp_shard"])                   # further axes come afterwards

Same collectives, same shards and names as `tensor_parallel_by_hand`; here DTensor finds out where
to send what. torch splits tied embeddings into two parameters without a word; they are tied again.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from labsupport.model import Llama
from labsupport.parallel.agree import send_first_weights
from labsupport.parallel.tensor.functions import check_sequence
from labsupport.parallel.tensor.loss import split_token_loss
from labsupport.parallel.tensor.start import check_whole


def tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Llama:
    """Split `model` over the ranks of `mesh`, in place, from rank 0's weights; names stay.

    Logits come as a DTensor split by vocabulary. Raises ValueError for a model that does not divide
    by the number of ranks (`config.check_fits`), and for one that is wrapped or split already.
    """
    check_whole(model, mesh)
    send_first_weights(model, mesh.get_group())
    stream = Shard(1) if sequence_parallel else Replicate()  # of (batch, seq, hidden)
    norm = SequenceParallel(use_local_output=True) if sequence_parallel else _Replicated()
    into = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
    attention = PrepareModuleInput(
        input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
    )
    out = RowwiseParallel(output_layouts=stream)
    shares_heads = model.config.num_kv_heads % mesh.size() != 0
    kv = _SharedHead(model.config.head_dim) if shares_heads else ColwiseParallel()
    block: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": attention,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "self_attn.o_proj": out,
        "post_attention_layernorm": norm,
        "mlp": into,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": out,
    }
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    plan |= {f"model.layers.*.{name}": style for name, style in block.items()}
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, param in model.named_parameters():
        param.requires_grad_(trained[name])  # SequenceParallel forgets what is frozen
    model.register_forward_pre_hook(_place_gradients)
    model.model.embed_tokens.register_forward_hook(_arrived)
    if sequence_parallel:
        check = partial(_check_length, ranks=mesh.size())
        model.model.embed_tokens.register_forward_pre_hook(check)
    model.token_loss = partial(split_token_loss, model)  # type: ignore[method-assign]
    return model


def _check_length(_: nn.Module, inputs: tuple[Tensor, ...], *, ranks: int) -> None:
    """DTensor would pad an uneven sequence, and the ranks then expect other sizes: an abort."""
    check_sequence(inputs[0].shape[1], ranks)


def _arrived(_: nn.Module, __: object, h: Tensor) -> Tensor:
    """Wait for the sum here: a compiled block cannot take a tensor that is still under way."""
    return h.clone()


def _place_gradients(model: nn.Module, _: object) -> None:
    """Cut each gradient as its weight: DTensor leaves parts of a sum where ranks saw other tokens.

    Asked for at each forward, since a model that gets its memory late (from meta) gets new tensors.
    """
    for param in model.parameters():
        if isinstance(param, DTensor) and param.requires_grad and not param._backward_hooks:
            # Those of norms and shared heads are added up: an all-reduce of the weight's size.
            place = partial(DTensor.redistribute, placements=param.placements)
            param.register_hook(place)  # type: ignore[no-untyped-call]


class _Replicated(ParallelStyle):
    """Every rank holds all of the module and sees all tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        copy = (Replicate(),)
        return distribute_module(
            module,
            device_mesh,
            _hold_copies,
            lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, copy, run_check=False),  # type: ignore[arg-type]
            lambda _, outputs, mesh: outputs.to_local(),
        )


class _SharedHead(ParallelStyle):
    """k or v with fewer heads than ranks: whole on every rank, which uses the one of its queries.

    Its gradient is that of this head only: a part of a sum (Partial) that DTensor carries on.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_head(_: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
            num_heads = outputs.shape[-1] // self.head_dim
            first = mesh.get_local_rank() * num_heads // mesh.size() * self.head_dim
            local = outputs.to_local(grad_placements=[Partial()])
            return local.narrow(-1, first, self.head_dim)

        return distribute_module(module, device_mesh, _hold_copies, None, own_head)  # type: ignore[arg-type]


def _hold_copies(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Weights that are equal on all ranks become DTensors that say so; nothing is sent."""
    for name, param in module.named_parameters(recurse=False):
        copy = DTensor.from_local(param.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(copy, requires_grad=param.requires_grad))
