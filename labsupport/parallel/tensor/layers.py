"""How is one layer split over ranks? Columns first, rows second, and one sum at the end.

    x ── f ──►  [W₁ W₂]ᵀ   ──►  y₁ | y₂   ──►  [V₁]   ──►  y₁V₁ + y₂V₂  ── g ──►
               by columns       each rank      [V₂]         each rank has
               (rows of the     has its own    by rows      one summand
                weight)         features

    ParallelSwiGLU(block.mlp, mesh, enter=f, leave=g)           # gate, up by columns, down by rows
    ParallelAttention(block.self_attn, mesh, enter=f, leave=g)  # heads are columns of q, k, v

What lies between the two products never asks for another rank's numbers: silu(gate) · up works on
single features, attention on single heads. `enter` and `leave` are f and g of functions.py, or
their counterparts under sequence parallel. A weight is a DTensor: it only notes which part of which
matrix this rank holds; every layer computes with its `to_local()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from labsupport.model import RMSNorm, Rotary, SelfAttention, SwiGLU
from labsupport.parallel.tensor.functions import copy_to_ranks

Seam = Callable[[Tensor], Tensor]
"""Where the stream enters a split layer, or leaves it."""


def held(weight: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """What this rank keeps of a weight that all ranks hold; nothing is sent."""
    shard = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(shard, requires_grad=weight.requires_grad)


def local(weight: Tensor) -> Tensor:
    """This rank's numbers; the gradient finds its way back."""
    assert isinstance(weight, DTensor)
    return weight.to_local()


class SplitLinear(nn.Linear):
    """What the next three have in common: what `placement` leaves this rank of a weight."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = held(linear.weight, mesh, placement)


class ColumnLinear(SplitLinear):
    """(…, in) -> (…, out / n): each rank has some of the outputs, of all inputs."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear, mesh, Shard(0))  # (out / n, in)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))


class RowLinear(SplitLinear):
    """(…, in / n) -> (…, out): each rank has some of the inputs, and so a part of every sum."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, *, leave: Seam) -> None:
        super().__init__(linear, mesh, Shard(1))  # (out, in / n)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, local(self.weight)))


class SharedHeadLinear(SplitLinear):
    """(…, in) -> (…, head_dim): k or v with fewer heads than ranks, so that some share a head.

    The matrix is whole on every rank, which uses the rows of one head; f adds up the gradients.
    """

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, *, head_dim: int) -> None:
        super().__init__(linear, mesh, Replicate())  # (kv_heads · head_dim, in)
        self.group = mesh.get_group()
        num_heads = linear.out_features // head_dim
        head = mesh.get_local_rank() * num_heads // mesh.size()
        self.rows = slice(head * head_dim, (head + 1) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to_ranks(local(self.weight), self.group)[self.rows])


class ParallelAttention(SelfAttention):
    """Each rank attends with its own heads: the Llama reads their number off its projections."""

    def __init__(self, whole: SelfAttention, mesh: DeviceMesh, *, enter: Seam, leave: Seam) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.attend, self.enter = whole.head_dim, whole.attend, enter
        num_kv_heads = whole.k_proj.out_features // whole.head_dim
        kv_linear: Callable[[nn.Linear, DeviceMesh], nn.Linear] = ColumnLinear
        if num_kv_heads % mesh.size():
            kv_linear = partial(SharedHeadLinear, head_dim=whole.head_dim)
        self.q_proj = ColumnLinear(whole.q_proj, mesh)
        self.k_proj = kv_linear(whole.k_proj, mesh)
        self.v_proj = kv_linear(whole.v_proj, mesh)
        self.o_proj = RowLinear(whole.o_proj, mesh, leave=leave)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        return super().forward(self.enter(x), rotary)


class ParallelSwiGLU(SwiGLU):
    """Each rank has its own features between gate, up and down."""

    def __init__(self, whole: SwiGLU, mesh: DeviceMesh, *, enter: Seam, leave: Seam) -> None:
        nn.Module.__init__(self)
        self.enter = enter
        self.gate_proj = ColumnLinear(whole.gate_proj, mesh)
        self.up_proj = ColumnLinear(whole.up_proj, mesh)
        self.down_proj = RowLinear(whole.down_proj, mesh, leave=leave)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.enter(x))


class ParallelNorm(RMSNorm):
    """The whole weight on every rank.

    `use` is nothing where all ranks see all tokens, and f where each sees its own (sequence
    parallel): then the weight's gradient is the sum of the ranks'.
    """

    def __init__(self, whole: RMSNorm, mesh: DeviceMesh, *, use: Seam) -> None:
        super().__init__(0, eps=whole.eps)
        self.weight = held(whole.weight, mesh, Replicate())
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.use(local(self.weight)) * wide.to(x.dtype)


class VocabEmbedding(nn.Embedding):
    """Each rank knows some of the tokens and gives zeros for the others; the sum is the table's."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, *, leave: Seam) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = held(embedding.weight, mesh, Shard(0))  # (vocab / n, hidden)
        self.first = first_entry(embedding.num_embeddings, mesh.get_group())
        self.leave = leave

    def forward(self, input_ids: Tensor) -> Tensor:
        table, row = local(self.weight), input_ids - self.first
        is_other = (row < 0) | (row >= len(table))
        h = F.embedding(row.masked_fill(is_other, 0), table)  # (batch, seq, hidden)
        return self.leave(h.masked_fill(is_other.unsqueeze(-1), 0))


class VocabLinear(ColumnLinear):
    """(batch, seq, hidden) -> logits of this rank's tokens, noted as a part of all of them."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, *, enter: Seam) -> None:
        super().__init__(linear, mesh)
        self.mesh, self.enter = mesh, enter

    def forward(self, x: Tensor) -> DTensor:
        logits = super().forward(self.enter(x))  # (batch, seq, vocab / n)
        shape = torch.Size((*logits.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, self.mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
        )


def first_entry(vocab_size: int, group: dist.ProcessGroup | None) -> int:
    """The first token that this rank knows: rows are cut as torch.chunk cuts them, full first."""
    return dist.get_rank(group) * -(-vocab_size // dist.get_world_size(group))
