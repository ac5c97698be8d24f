"""How is a softmax taken over keys that are never all there at once? Block by block.

For each query keep, of the blocks seen so far, the largest score m, the sum l of exp(s - m) and the
sum o of exp(s - m) · v. When a block brings a larger m', first multiply l and o by exp(m - m')
(Milakov and Gimelshein, 2018). At the end

    out = o / l            L = m + log l            so that p = exp(s - L), whatever the block

and a backward that keeps L needs no scores either (FlashAttention; Dao et al., 2022):

    dv = pᵀ do        ds = p · (do vᵀ - rowsum(do · out))        dq = ds k        dk = dsᵀ q

    rows = RunningSoftmax(query)                    # (batch, kv_heads, group, queries, head_dim)
    rows.add(scores(query, key, is_diagonal=False), value)    # key (batch, kv_heads, keys, …)
    out, log_sum = rows.result()

`group` are the heads / kv_heads query heads that share a key (GQA). Everything here is fp32.
In the products: b batch, h kv_heads, g group, q queries, k keys, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, einsum


def scores(query: Tensor, key: Tensor, *, is_diagonal: bool) -> Tensor:
    """q kᵀ / √head_dim of one block, (b, h, g, q, k).

    On the diagonal queries and keys are the same tokens: -inf where the key is the later one.
    """
    s: Tensor = einsum("bhgqd,bhkd->bhgqk", query * query.shape[-1] ** -0.5, key)
    if is_diagonal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s.masked_fill_(later, -torch.inf)
    return s


class RunningSoftmax:
    """softmax(scores) · v of some queries, over keys that arrive a block at a time."""

    def __init__(self, query: Tensor) -> None:
        self.out = torch.zeros_like(query)  # o: (b, h, g, q, d)
        self.total = query.new_zeros(query.shape[:-1])  # l: (b, h, g, q)
        self.largest = query.new_full(query.shape[:-1], -torch.inf)  # m

    def add(self, scores: Tensor, value: Tensor) -> None:
        """Take in one block: scores (b, h, g, q, k), which it overwrites, value (b, h, k, d)."""
        largest = torch.maximum(self.largest, scores.amax(-1))
        rescale = torch.exp(self.largest - largest)  # what was added up had a smaller maximum
        weights = scores.sub_(largest[..., None]).exp_()
        added = einsum("bhgqk,bhkd->bhgqd", weights, value)
        self.out = self.out * rescale[..., None] + added
        self.total = self.total * rescale + weights.sum(-1)
        self.largest = largest

    def result(self) -> tuple[Tensor, Tensor]:
        """The output (b, h, g, q, d) and the log-sum-exp L (b, h, g, q)."""
        return self.out / self.total[..., None], self.largest + self.total.log()


def block_gradients(
    query: Tensor, key: Tensor, value: Tensor, *,
    log_sum: Tensor, grad_out: Tensor, dot: Tensor, is_diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What one block adds to dq, dk and dv; `dot` is rowsum(do · out), (b, h, g, q) as log_sum."""
    scale = query.shape[-1] ** -0.5
    p = scores(query, key, is_diagonal=is_diagonal).sub_(log_sum[..., None]).exp_()
    dp = einsum("bhgqd,bhkd->bhgqk", grad_out, value)
    ds = dp.sub_(dot[..., None]).mul_(p)  # in place: blocks of scores are the largest tensors here
    return (
        einsum("bhgqk,bhkd->bhgqd", ds, key) * scale,
        einsum("bhgqk,bhgqd->bhkd", ds, query) * scale,
        einsum("bhgqk,bhgqd->bhkd", p, grad_out),
    )
