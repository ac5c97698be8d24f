"""Does a data-parallel wrapper really compute what one process computes?

    loss, |g|, gradients and weights of rank r after k steps  =  those of one process, for every r

    prove_equal(ranks, OverlappedDDP)               # a table, one row a rank
    prove_equal(ranks, data_parallel, steps=10).is_equal

Every rank trains a small model twice: alone on the global batch with `train_step`, the oracle, and
wrapped, on its own part of it, beginning with weights that no other rank has. What the ranks
exchange is counted too: gradients should travel once a step.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.config import ModelConfig, TrainConfig
from labsupport.model import Llama
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    TrainedRun,
    build,
    proof_batches,
    train,
)

TOLERANCE = 1e-5
"""Relative. Sums are taken in another order, which alone gives about 1e-6 after three steps."""
ONCE = (0.5, 1.5)
"""Times its gradients that one of several ranks may exchange in a step: not never, not twice."""

Wrap = Callable[[Llama], nn.Module]


class RanksPool(Protocol):
    """`labsupport.Ranks`."""

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class RankProof:
    """How far one rank was from one process: largest relative differences over all steps."""

    rank: int
    world_size: int
    loss: float
    grad_norm: float
    """Of the norm that is logged and clipped by."""
    gradients: float
    """As the optimizer got them; relative to the largest entry of the tensor."""
    weights: float
    """After the last step."""
    exchanges: float
    """Bytes of gradients exchanged in a step, as a multiple of the gradients; 1 is right."""
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """All within the tolerance (NaN is not), and gradients exchanged once a step."""
        worst = (self.loss, self.grad_norm, self.gradients, self.weights)
        is_once = self.world_size == 1 or ONCE[0] < self.exchanges < ONCE[1]
        return all(d <= self.tolerance for d in worst) and is_once


@dataclass(frozen=True, repr=False)
class Proof:
    """The verdict over all ranks; shows itself as a table, as text or HTML."""

    ranks: tuple[RankProof, ...]

    @property
    def is_equal(self) -> bool:
        """Every rank equals one process."""
        return all(rank.is_equal for rank in self.ranks)

    def rows(self) -> list[tuple[str, ...]]:
        """Header and a line a rank; differences within the tolerance are only called that."""
        names = ("loss", "grad_norm", "gradients", "weights")
        head = ("rank", "loss", "|g|", "gradients", "weights", "sent", "equal")
        lines: list[tuple[str, ...]] = [head]
        for one in self.ranks:
            within = f"≤ {one.tolerance:.0e}"
            values = (getattr(one, name) for name in names)
            shown = (within if v <= one.tolerance else f"{v:.1e}" for v in values)
            verdict = "yes" if one.is_equal else "NO"
            lines.append((str(one.rank), *shown, f"{one.exchanges:.1f} ×", verdict))
        return lines

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in row] for row in self.rows()]
        names = "".join(f"<th>{name}</th>" for name in head)
        lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
        return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def prove_equal(
    ranks: RanksPool,
    wrap: Wrap,
    *,
    model: ModelConfig = PROOF_MODEL,
    config: TrainConfig = PROOF_CONFIG,
    steps: int = 3,
    tolerance: float = TOLERANCE,
) -> Proof:
    """Train on every rank of the pool and beside it in one process, and compare.

    `wrap` takes the model and gives back a wrapper that averages gradients over all ranks.
    """
    case = {"model": model, "config": config, "steps": steps, "tolerance": tolerance}
    return Proof(tuple(ranks.run(prove_on_rank, wrap, **case)))


def prove_on_rank(
    wrap: Wrap,
    *,
    model: ModelConfig = PROOF_MODEL,
    config: TrainConfig = PROOF_CONFIG,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    wrap_alone: Wrap | None = None,
) -> RankProof:
    """This rank's share of `prove_equal`, to be called on all ranks of the default group.

    `wrap_alone` is for a wrapper that changes the arithmetic too (fully_sharded in bf16): the same
    on a mesh of one rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    batches = [proof_batches(step, config=config, world_size=world_size) for step in range(steps)]
    alone = build(model, config, seed=0, device=device)
    oracle = train(wrap_alone(alone) if wrap_alone else alone, batches, config=config)
    per_rank = config.gradient_accumulation_steps
    mine = [batch[rank * per_rank :][:per_rank] for batch in batches]
    wrapped = wrap(build(model, config, seed=rank, device=device))
    run = train(wrapped, mine, config=config, group=dist.group.WORLD)
    return compare(run, oracle, rank=rank, world_size=world_size, tolerance=tolerance)


def compare(
    run: TrainedRun, oracle: TrainedRun, *, rank: int, world_size: int, tolerance: float = TOLERANCE
) -> RankProof:
    """How far a rank's run is from the one-process run."""
    gradient_bytes = sum(g.numel() * g.element_size() for g in oracle.gradients[-1].values())
    return RankProof(
        rank=rank,
        world_size=world_size,
        loss=largest_difference(_named(run.losses), _named(oracle.losses)),
        grad_norm=largest_difference(_named(run.grad_norms), _named(oracle.grad_norms)),
        gradients=largest_difference(_named_by_step(run), _named_by_step(oracle)),
        weights=largest_difference(run.weights, oracle.weights),
        exchanges=run.exchanged_bytes / gradient_bytes,
        tolerance=tolerance,
    )


def largest_difference(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> float:
    """Largest |a - b| of any entry, relative to the largest |b| of its tensor.

    Infinite where one has a tensor that the other lacks.
    """
    if these.keys() != those.keys():
        return float("inf")
    differences = [0.0]
    for name, that in those.items():
        scale = that.abs().max().item() or 1.0
        differences.append((these[name] - that).abs().max().item() / scale)
    return torch.tensor(differences, dtype=torch.float64).max().item()  # NaN stays NaN


def _named(numbers: Iterable[float]) -> dict[str, Tensor]:
    return {str(i): torch.tensor(number, dtype=torch.float64) for i, number in enumerate(numbers)}


def _named_by_step(run: TrainedRun) -> dict[str, Tensor]:
    return {
        f"{step}.{name}": gradient
        for step, gradients in enumerate(run.gradients)
        for name, gradient in gradients.items()
    }
