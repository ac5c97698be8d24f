"""What does a ring of n ranks cost in attention, and what does it save?

    k and v of a rank     P = 2 · batch · kv_heads · seq/n · head_dim numbers of e bytes
    sent by a rank        forward (n-1)·e·P        backward (n-1)·e·P, and n·4·P of dk and dv
    kept by a rank        q, k, v, output, a log-sum for each row of scores: 1/n of one process
    blocks of scores      contiguous: rank r computes r + 1 of (seq/n)²
                          zig-zag:    every rank 2n + 1 of (seq/2n)², with 2 of them half masked

    ring = ring_cost(config, context_parallel_size=4, batch_size=1, seq_len=8192)
    ring.forward_sent_bytes, ring.kept_bytes                    # of one layer
    max(contiguous_pairs(8192, context_parallel_size=4))        # the rank all others wait for

Liu, Zaharia and Abbeel, 2023 (arXiv 2310.01889). The code is `labsupport.parallel.context`.
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.config import ModelConfig
from labsupport.config.rules import at_least, require

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RingCost:
    """Of one layer, on one rank, for one micro batch. Label: predicted."""

    forward_sent_bytes: int
    backward_sent_bytes: int
    kept_bytes: int
    """From forward to backward by the attention itself: q, k, v, output, log-sums."""
    scores_bytes: int
    """One block of scores under zig-zag: fp32, gone as soon as it is used."""


def ring_cost(
    model: ModelConfig,
    *,
    context_parallel_size: int,
    batch_size: int,
    seq_len: int,
    element_bytes: int = FP32_BYTES,
) -> RingCost:
    """Ring attention by hand, zig-zag; `element_bytes` are those of q, k and v (2 under bf16)."""
    n = context_parallel_size
    _check(seq_len, n, chunks_per_rank=2)
    at_least(1, batch_size=batch_size)
    tokens = batch_size * seq_len // n
    query_size = tokens * model.num_heads * model.head_dim
    kv_size = 2 * tokens * model.num_kv_heads * model.head_dim
    log_sums = tokens * model.num_heads
    chunk = seq_len // (2 * n)
    return RingCost(
        forward_sent_bytes=(n - 1) * kv_size * element_bytes,
        backward_sent_bytes=(n - 1) * kv_size * element_bytes
        + (n * kv_size * FP32_BYTES if n > 1 else 0),
        kept_bytes=(2 * query_size + kv_size) * element_bytes + log_sums * FP32_BYTES,
        scores_bytes=batch_size * model.num_heads * chunk**2 * FP32_BYTES,
    )


def contiguous_pairs(seq_len: int, *, context_parallel_size: int) -> tuple[int, ...]:
    """Scores that each rank computes for a head: later ranks more, up to 2n/(n+1) of the mean."""
    n = context_parallel_size
    _check(seq_len, n, chunks_per_rank=1)
    return tuple((rank + 1) * (seq_len // n) ** 2 for rank in range(n))


def zigzag_pairs(seq_len: int, *, context_parallel_size: int) -> tuple[int, ...]:
    """Scores that each rank computes for a head: equal."""
    n = context_parallel_size
    _check(seq_len, n, chunks_per_rank=2)
    return ((2 * n + 1) * (seq_len // (2 * n)) ** 2,) * n


def _check(seq_len: int, context_parallel_size: int, *, chunks_per_rank: int) -> None:
    at_least(1, context_parallel_size=context_parallel_size, seq_len=seq_len)
    chunks = chunks_per_rank * context_parallel_size
    rule = f"must be a multiple of {chunks} (chunks of {context_parallel_size} ranks)"
    require(seq_len % chunks == 0, "seq_len", seq_len, rule, max(1, seq_len // chunks) * chunks)
