"""How does a token look back at keys and values that lie on other ranks? They come round.

              hop 0       hop 1       hop 2
    rank 0    q0 · k0     q0 · k2     q0 · k1       q stays; k and v move on by one rank a hop;
    rank 1    q1 · k1     q1 · k0     q1 · k2       after n hops every query has met every key,
    rank 2    q2 · k2     q2 · k1     q2 · k0       and no rank held more than two parts

What a query has seen is added up by `RunningSoftmax`; blocks of later keys only are skipped. In the
backward k and v come round once more, and the dk and dv of a part travel with it until they are
home (ring attention; Liu, Zaharia and Abbeel, 2023).

    out = ring_attention(q, k, v, group=mesh.get_group())    # q, k, v of this rank's tokens
    out.backward(grad_out)

A part has S = 2 · batch · kv_heads · seq/n · head_dim numbers, however many the query heads. A rank
sends (n-1)·S forward; (n-1)·S backward, and n·S of dk and dv, those in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from labsupport.parallel.context.blockwise import RunningSoftmax, block_gradients, scores
from labsupport.parallel.context.zigzag import Split, zigzag_chunks


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup, split: Split = zigzag_chunks
) -> Tensor:
    """Causal attention over the tokens of all ranks of `group`; all of them must call it.

    q, k, v are (batch, heads, seq/n, head_dim); k and v may have fewer heads (GQA) and travel so.
    `split` says which chunks of the text this rank's tokens are, as in `shard_sequence`.
    """
    world_size = dist.get_world_size(group)
    order = [chunk for rank in range(world_size) for chunk in split(rank, world_size)]
    num_chunks, seq_len = len(order) // world_size, q.shape[-2]
    if seq_len % num_chunks:
        raise ValueError(
            f"{seq_len} tokens on this rank must be a multiple of its {num_chunks} chunks; "
            f"{max(1, seq_len // num_chunks) * num_chunks} works"
        )
    out: Tensor = RingAttention.apply(q, k, v, group.group_name, order)  # type: ignore[no-untyped-call]
    return out


class RingAttention(torch.autograd.Function):
    """One journey round the ring forward, one backward; between them no scores are kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group_name: str, order: list[int]
    ) -> Tensor:
        out: Tensor
        out, log_sum = ring_forward(q, k, v, group_name, order)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.ring = Ring.of(group_name, order)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            return *ring_backward(ctx.ring, ctx.saved_tensors, grad_out), None, None


@torch.library.custom_op("labsupport::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, order: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Output like q, log-sum-exp (batch, kv_heads, group, seq/n) in fp32.

    An operator of torch (RING_FORWARD), so that selective activation checkpointing can keep both.
    """
    ring = Ring.of(group_name, order)
    queries = ring.chunks_of(by_kv_head(q, k))
    rows = [RunningSoftmax(query) for query in queries]
    with torch.autocast(q.device.type, enabled=False):  # bf16 travels, sums are taken in fp32
        for hop, kv in ring.travel(torch.stack((k, v))):
            visitors = ring.chunks_of(kv.float())
            for i, j, is_diagonal in ring.blocks(hop):
                key, value = visitors[j]
                rows[i].add(scores(queries[i], key, is_diagonal=is_diagonal), value)
    outs, log_sums = zip(*(row.result() for row in rows), strict=True)
    return torch.cat(outs, dim=-2).flatten(1, 2).to(q.dtype), torch.cat(log_sums, dim=-1)


@ring_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, order: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The shapes, for meta tensors."""
    log_sum = q.new_empty(by_kv_head(q, k).shape[:-1], dtype=torch.float32)
    return q.new_empty(q.shape), log_sum


RING_FORWARD: OpOverload = torch.ops.labsupport.ring_forward.default


def ring_backward(
    ring: Ring, saved: Sequence[Tensor], grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's tokens."""
    q, k, v, out, log_sum = saved
    queries, grads = (ring.chunks_of(by_kv_head(x, k)) for x in (q, grad_out))
    dot = (by_kv_head(out, k) * by_kv_head(grad_out, k)).sum(-1)
    dots, log_sums = (x.chunk(ring.num_chunks, dim=-1) for x in (dot, log_sum))
    grad_queries = [torch.zeros_like(query) for query in queries]
    arrival = Arrival(torch.zeros((2, *k.shape), device=k.device))
    for hop, kv in ring.travel(torch.stack((k, v))):
        grad_kv = torch.zeros_like(kv, dtype=torch.float32)
        visitors, their_grads = ring.chunks_of(kv.float()), ring.chunks_of(grad_kv)
        for i, j, is_diagonal in ring.blocks(hop):
            grad_query, *grad_key_value = block_gradients(
                queries[i], *visitors[j], log_sum=log_sums[i], grad_out=grads[i], dot=dots[i],
                is_diagonal=is_diagonal,
            )  # fmt: skip
            grad_queries[i] += grad_query
            their_grads[j].add_(torch.stack(grad_key_value))
        grad_kv += arrival.wait()  # what the ranks before this one found for the same keys
        arrival = ring.pass_on(grad_kv)
    grad_k, grad_v = arrival.wait()  # by the n-th hop they are home
    grad_q = torch.cat(grad_queries, dim=-2).flatten(1, 2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, seq, head_dim) -> (batch, kv_heads, group, seq, head_dim), in fp32."""
    return x.float().reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


@dataclass(frozen=True)
class Arrival:
    """A part that is on its way to this rank."""

    part: Tensor
    works: Sequence[dist.Work] = ()

    def wait(self) -> Tensor:
        """The part, once it is here (and what left in exchange has left)."""
        for work in self.works:
            work.wait()
        return self.part


@dataclass(frozen=True)
class Ring:
    """One rank's place in it: whom it hears, whom it tells, and which chunks meet here when."""

    group: dist.ProcessGroup
    rank: int
    size: int
    order: tuple[int, ...]
    """Chunks of rank 0, then of rank 1, …, numbered as they stand in the text."""

    @classmethod
    def of(cls, group_name: str, order: Sequence[int]) -> Self:
        """The ring through the ranks of a group."""
        group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
        return cls(group, dist.get_rank(group), dist.get_world_size(group), tuple(order))

    @property
    def num_chunks(self) -> int:
        """Chunks of each rank."""
        return len(self.order) // self.size

    def chunks_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of x (…, seq/n, head_dim), one a chunk."""
        return x.chunk(self.num_chunks, dim=-2)

    def blocks(self, hop: int) -> Iterator[tuple[int, int, bool]]:
        """(my chunk i, visiting chunk j, are they one?) wherever queries of i see keys of j."""
        visitor = (self.rank - hop) % self.size
        for i in range(self.num_chunks):
            for j in range(self.num_chunks):
                mine = self.order[self.rank * self.num_chunks + i]
                theirs = self.order[visitor * self.num_chunks + j]
                if theirs <= mine:
                    yield i, j, theirs == mine

    def travel(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(hop, the part that is here then): it leaves for the next rank while it is used."""
        for hop in range(self.size):
            is_last = hop == self.size - 1
            arrival = Arrival(part) if is_last else self.pass_on(part)
            yield hop, part
            part = arrival.wait()

    def pass_on(self, part: Tensor) -> Arrival:
        """Begin a hop. `part` must not change before the arrival is waited for."""
        if self.size == 1:
            return Arrival(part)
        arriving = torch.empty_like(part)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # Every rank sends its whole part to the next one and gets that of the one before.
        messages = [
            dist.P2POp(dist.isend, part, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=before),
        ]
        return Arrival(arriving, dist.batch_isend_irecv(messages))
