"""Checks of notebook 08: where f and g stand, three ranks, an uneven vocabulary, links, zig-zag.

    from labsupport.checks import tensor_parallel as check
    check.three_ranks(config)                      # splits a real model over three ranks
    check.place_f_and_g(layer, ranks)              # runs it on the ranks, forward and backward

What a learner wrote runs on the pool that the notebook made; its errors become the hint.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from labsupport.checks import Verdict, blank, is_blank, not_yet, number, right
from labsupport.checks.on_ranks import try_on_ranks
from labsupport.config import ModelConfig, ParallelConfig
from labsupport.config.fits import check_fits
from labsupport.model import causal_attention
from labsupport.parallel.context import ring_attention, shard_sequence, unshard_sequence
from labsupport.parallel.tensor import tensor_parallel_by_hand
from labsupport.parallel.tensor.functions import copy_to_ranks, reduce_from_ranks
from labsupport.plan.links import roads
from labsupport.plan.tensor_parallel_step import largest_size as largest_size_on
from labsupport.ranks import Ranks
from labsupport.train.proof import prove_equal

DEADLINE_S = 20.0
CLOSE, SAME_FACTOR = 1e-5, 1e-3
MOST_PARAMS = 5_000_000
VOCABULARY = 51
SIZES, TOKENS, FLOPS_PER_S, LEAST = (2, 4, 8, 16), 4096, 400e12, 0.5


def place_f_and_g(answer: Any, ranks: Ranks) -> Verdict:
    """`layer(x, a, b, f, g)`: silu(x · a) · b of split matrices, right forward and backward."""
    results = try_on_ranks(_layer_errors, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    n = len(results)
    for rank, (forward, factor, backward) in enumerate(results):
        if forward is None:
            return blank("The function returns nothing yet.")
        if abs(forward - (n - 1)) < SAME_FACTOR:
            return not_yet(f"the result is {n} times too large: what was a sum is added up again")
        if forward > CLOSE:
            return not_yet(
                f"on rank {rank} the result is not silu(x·a)·b of the whole matrices: each rank "
                "has a part of a sum, and somebody has to add the parts up, in the forward pass"
            )
        if backward > CLOSE and abs(factor - n) < SAME_FACTOR:
            return not_yet(f"the result is right, but the gradient of x is {n} times too large")
        if backward > CLOSE:
            return not_yet(
                f"the result is right, but on rank {rank} the gradient of x is the part that came "
                "back through its own columns: which of the two adds up in the backward pass?"
            )
    return right("f where the stream is copied to all, g where parts become a sum.")


def three_ranks(answer: Any) -> Verdict:
    """A ModelConfig that three ranks can share; the split model is proved equal to a whole one."""
    if is_blank(answer):
        return blank()
    if not isinstance(answer, ModelConfig):
        return not_yet("a ModelConfig is wanted, for example replace(TINY, …)")
    if answer.num_params > MOST_PARAMS:
        return not_yet(f"{answer.num_params:,} parameters; stay below {MOST_PARAMS:,}")
    parallel = ParallelConfig(tensor_parallel_size=3)
    try:
        check_fits(answer, parallel, seq_len=8)
    except ValueError as error:
        return not_yet(str(error))
    with Ranks(3, threads_per_rank=1) as three:
        proof = prove_equal(three, _split_by_hand, parallel=parallel, model=answer, steps=1)
    if not proof.is_equal:
        return not_yet(f"it can be split, but is not equal to one process:\n{proof}")
    return right(
        "Proved on three ranks. They must divide heads and widths, and need not be a power of two."
    )


def uneven_vocabulary(answer: Any, ranks: Ranks) -> Verdict:
    """`embed(input_ids, rows, first, g)` of a table of 51 rows that the ranks share unequally."""
    results = try_on_ranks(_embedding_errors, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(results, Verdict):
        return results
    for rank, (forward, backward, is_own) in enumerate(results):
        if forward is None:
            return blank("The function returns nothing yet.")
        if forward > CLOSE and is_own:
            return not_yet(
                f"on rank {rank} the tokens that it knows are right and the others wrong: the "
                "ranks' parts have to be added up"
            )
        if forward > CLOSE:
            return not_yet(
                f"on rank {rank} the vectors are not the table's rows. Its row 0 is entry `first`. "
                "And what does it give for a token that it does not know? It must add nothing"
            )
        if backward > CLOSE:
            return not_yet(f"right vectors, but on rank {rank} the rows' gradient is wrong")
    return right(
        "Zeros for strangers, and one sum. No rank needs to hold as many rows as the next."
    )


def largest_size(answer: object) -> Verdict:
    """Of 2, 4, 8, 16 ranks on PCIe 5, the most that compute half of the time: llama-3.1-8b."""
    case: dict[str, Any] = {
        "micro_batch_size": 1,
        "seq_len": TOKENS,
        "flops_per_s": FLOPS_PER_S,
        "link": roads()["pcie5-x16"],
    }
    llama = ModelConfig.named("llama-3.1-8b")
    wanted = largest_size_on(llama, SIZES, least_utilisation=LEAST, **case)
    hints: dict[float, str] = {
        largest_size_on(llama, SIZES, least_utilisation=LEAST, **{**case, "link": link}): words
        for link, words in (
            (roads()["nvlink4"], "that is the answer for NVLink 4"),
            (roads()["pcie4-x16"], "that is the answer for PCIe 4"),
        )
    }
    return number(
        answer,
        wanted,
        hints={size: words for size, words in hints.items() if size != wanted},
        why="A wider model would carry more: computing grows with the square of the width.",
    )


def balanced_split(answer: Any, ranks: Ranks) -> Verdict:
    """`chunks(rank, world_size)`: two of 2n chunks, so that all have as much causal work."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted")
    for n in (2, 3, 4, 8):
        try:
            held = [answer(rank, n) for rank in range(n)]
            if any(is_blank(chunks) for chunks in held):
                return blank("The function returns nothing yet.")
            parts = [tuple(int(chunk) for chunk in chunks) for chunks in held]
        except Exception as error:
            return not_yet(f"on {n} ranks it raises {type(error).__name__}: {error}")
        if sorted(chunk for chunks in parts for chunk in chunks) != list(range(2 * n)):
            return not_yet(f"{n} ranks hold {parts}: each of 0…{2 * n - 1} is wanted once")
        work = [sum(chunk + 0.5 for chunk in chunks) for chunks in parts]
        if {len(chunks) for chunks in parts} != {2} or max(work) > min(work):
            shares = ", ".join(f"{one / sum(work):.0%}" for one in work)
            return not_yet(
                f"{n} ranks hold {parts} and do {shares} of the work: chunk c looks at c chunks "
                "before it and at half of itself"
            )
    worst = try_on_ranks(_ring_error, answer, ranks, deadline_s=DEADLINE_S)
    if isinstance(worst, Verdict):
        return worst
    if max(worst) > CLOSE:
        return not_yet("balanced, but the ring's result is not that of full attention")
    return right("An early chunk with a late one: equal work, and the ring gives the same result.")


# ---- on every rank -----------------------------------------------------------------------------


def _split_by_hand(model: Any, layout: Any) -> Any:
    return tensor_parallel_by_hand(model, layout.mesh["tp"])


def _layer_errors(answer: Any) -> tuple[float | None, float, float]:
    """Errors of result and of x's gradient, and by which factor the gradient is off."""
    group, n, rank = _everybody(), dist.get_world_size(), dist.get_rank()
    x, whole_x = (_random((4, 8), seed=0).requires_grad_() for _ in range(2))
    a, b = _random((8, 8 * n), seed=1), _random((8 * n, 8), seed=2)
    mine = slice(8 * rank, 8 * rank + 8)
    f, g = partial(copy_to_ranks, group=group), partial(reduce_from_ranks, group=group)
    wanted = F.silu(whole_x @ a) @ b
    result = answer(x, a[:, mine], b[mine], f, g)
    if is_blank(result):
        return None, 0.0, 0.0
    weights = _random((4, 8), seed=3)
    (wanted * weights).sum().backward()  # type: ignore[no-untyped-call]
    (result * weights).sum().backward()
    assert whole_x.grad is not None
    grad = torch.zeros_like(x) if x.grad is None else x.grad
    factor = float((grad / whole_x.grad).median())
    is_common = _error(grad, factor * whole_x.grad) < CLOSE
    return _error(result, wanted), factor if is_common else 0.0, _error(grad, whole_x.grad)


def _embedding_errors(answer: Any) -> tuple[float | None, float, bool]:
    """Errors of vectors and of the rows' gradient; are the tokens of this rank right?"""
    group, n, rank = _everybody(), dist.get_world_size(), dist.get_rank()
    table = _random((VOCABULARY, 8), seed=0)
    first = rank * -(-VOCABULARY // n)
    rows = table.chunk(n)[rank].clone().requires_grad_()
    input_ids = torch.arange(VOCABULARY, device=table.device).view(3, -1)
    result = answer(input_ids, rows, first, partial(reduce_from_ranks, group=group))
    if is_blank(result):
        return None, 0.0, False
    wanted, weights = F.embedding(input_ids, table), _random((*input_ids.shape, 8), seed=1)
    (result * weights).sum().backward()
    known = (input_ids >= first) & (input_ids < first + len(rows))
    grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
    return (
        _error(result, wanted),
        _error(grad, weights[known]),
        _error(result[known], wanted[known]) < CLOSE,
    )


def _ring_error(split: Any) -> float:
    """Of ring attention over this split, put together again, against full attention."""
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = [_random((1, 2, 4 * n, 8), seed=seed) for seed in range(3)]
    q, k, v = (shard_sequence(x, rank, n, split=split, dim=-2).contiguous() for x in whole)
    mine = ring_attention(q, k, v, group=_everybody(), split=split)
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine.contiguous())  # 2 · 4 · 8 numbers from each rank to each
    return _error(unshard_sequence(parts, split=split, dim=-2), causal_attention(*whole))


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _random(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """The same numbers on all ranks, on this rank's device."""
    is_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def _error(given: Any, wanted: Tensor) -> float:
    """Largest difference, relative to the largest number; infinite for another shape."""
    if not isinstance(given, Tensor) or given.shape != wanted.shape:
        return float("inf")
    return float((given - wanted).detach().abs().max() / wanted.detach().abs().max())
