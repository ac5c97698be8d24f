"""Does this model divide over these ranks? Asked before any rank starts.

    tp   every rank gets whole attention heads, an equal part of the feed-forward, some of the words
    sp   and equal parts of every sequence         cp   2 chunks of it: one early, one late

    check_fits(ModelConfig.named("tiny"), ParallelConfig(tensor_parallel_size=3), seq_len=128)
    # ValueError: tensor_parallel_size=3 must divide num_heads=4, …, for example 2

No power of two is asked for: 3 works where the sizes divide by 3. Hidden size and number of layers
may be anything, for no rank gets a part of those; and the vocabulary, if each rank gets a word: the
last one may have fewer than the others.
"""

from __future__ import annotations

import math

from labsupport.config.model import ModelConfig
from labsupport.config.parallel import ParallelConfig
from labsupport.config.rules import require


def check_fits(model: ModelConfig, parallel: ParallelConfig, *, seq_len: int) -> None:
    """Raise ValueError, with the numbers and a value that works, where something does not divide.

    Fewer key-value heads than tp ranks are fine if each serves a whole number of ranks, which then
    hold copies of it.
    """
    tp = parallel.tensor_parallel_size
    problems = _not_divided(model, tp)
    if problems:
        works = max(n for n in range(1, tp) if not _not_divided(model, n))
        rule = f"must divide {', and '.join(problems)}"
        require(False, "tensor_parallel_size", tp, rule, works)
    _check_sequence(parallel, seq_len)


def _not_divided(model: ModelConfig, tp: int) -> list[str]:
    """The sizes that `tp` ranks cannot share, each with its value."""
    problems = []
    if model.num_heads % tp:
        problems.append(f"num_heads={model.num_heads}")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        problems.append(f"num_kv_heads={model.num_kv_heads} or be a multiple of it")
    if model.intermediate_size % tp:
        problems.append(f"intermediate_size={model.intermediate_size}")
    most = -(-model.vocab_size // tp)  # words of each rank but the last
    if most * (tp - 1) >= model.vocab_size:
        problems.append(f"vocab_size={model.vocab_size} or leave a word to every rank")
    return problems


def _check_sequence(parallel: ParallelConfig, seq_len: int) -> None:
    """Every rank gets as many tokens as the next."""
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    chunks = 2 * cp if cp > 1 else 1
    rule = f"must be a multiple of {chunks} (2 chunks × {cp} context-parallel ranks)"
    if parallel.sequence_parallel:
        # The tp ranks split what the cp ranks hold: an odd chunk may be cut, a token may not.
        chunks = math.lcm(chunks, cp * tp)
        rule = f"must be a multiple of {chunks} ({tp} tensor-parallel ranks split the sequence"
        rule += f", each part of {cp})" if cp > 1 else ")"
    works = max(1, seq_len // chunks) * chunks
    require(seq_len % chunks == 0, "seq_len", seq_len, rule, works)
