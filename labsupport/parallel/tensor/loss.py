"""Can a loss be computed where no rank has all the logits?

    -log p = log Σ exp(z - m) - (z_label - m)         m = largest z

    vocab_parallel_token_loss(model(input_ids), labels)     # logits (batch, seq, vocab), split

Only three numbers a token travel: the largest logit, the sum of exponentials, the label's logit.
The gradient, softmax(z) - 1 at the label, needs no message at all.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from labsupport.config import IGNORE_INDEX
from labsupport.model import TokenLoss
from labsupport.parallel.tensor.functions import all_reduced
from labsupport.parallel.tensor.layers import first_entry


def vocab_parallel_token_loss(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
) -> TokenLoss:
    """`model.token_loss` of logits that are split by vocabulary; the same on every rank.

    Logits are a split model's, or this rank's part of them, with the `group` that has them all, and
    `vocab_size` where that is not a multiple of the ranks: the last has fewer then.
    """
    if isinstance(logits, DTensor):
        group, vocab_size = logits.device_mesh.get_group(), logits.shape[-1]
        logits = logits.to_local()
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} must match the logits' {tuple(logits.shape)}, "
            f"for example {tuple(logits.shape[:-1])}"
        )
    if vocab_size is None:
        vocab_size = logits.shape[-1] * dist.get_world_size(group)
    rows = labels - first_entry(vocab_size, group)
    total: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, rows, labels != IGNORE_INDEX, group
    )
    return TokenLoss(sum=total, num_tokens=(labels != IGNORE_INDEX).sum())


def split_token_loss(model: nn.Module, input_ids: Tensor, labels: Tensor) -> TokenLoss:
    """What becomes of `Llama.token_loss` in a split model, and so of its `loss`."""
    return vocab_parallel_token_loss(model(input_ids), labels)


class _CrossEntropy(Function):
    """Summed over the tokens that are `valid`; `rows` are labels counted from this rank's first."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, valid: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        z = logits.float()
        # Every rank sends its largest logit of each token, then two sums: 3 × 4 bytes a token.
        z = z - all_reduced(z.amax(-1), group, op=dist.ReduceOp.MAX).unsqueeze(-1)
        exp = z.exp()  # (batch, seq, vocab / n)
        normalizer = all_reduced(exp.sum(-1), group)  # (batch, seq)
        is_mine = (rows >= 0) & (rows < z.shape[-1])
        row = rows.where(is_mine, 0).unsqueeze(-1)  # (batch, seq, 1)
        of_label = all_reduced(z.gather(-1, row).squeeze(-1).where(is_mine, 0), group)
        ctx.save_for_backward(exp.div_(normalizer.unsqueeze(-1)), row, is_mine, valid)
        ctx.dtype = logits.dtype
        loss: Tensor = (normalizer.log() - of_label).where(valid, 0)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, row, is_mine, valid = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, row, -is_mine.unsqueeze(-1).to(softmax.dtype))
        return gradient.mul_((valid * grad).unsqueeze(-1)).to(ctx.dtype), None, None, None
