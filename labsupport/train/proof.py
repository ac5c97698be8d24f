"""Does a parallel strategy really compute what one process computes?

    loss, |g|, gradients and weights of rank r after k steps  =  those of one process, for every r

    prove_equal(ranks, OverlappedDDP)               # a table, one row a rank
    prove_equal(ranks, data_parallel, steps=10).is_equal
    prove_equal(
        ranks,
        lambda model, layout: tensor_parallel(model, layout.mesh["tp"]),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )

Every rank trains a small model twice: alone on the global batch with `train_step`, the oracle, and
wrapped, on its own part of it, beginning with weights that no other data-parallel rank has. Where
only gradients travel, they are counted too: once a step is right.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.config import ModelConfig, ParallelConfig, TrainConfig
from labsupport.parallel.layout import Layout
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    TrainedRun,
    train_alone,
    train_in,
)

TOLERANCE = 1e-5
"""Relative. Sums are taken in another order, which alone gives about 1e-6 after three steps."""
ONCE = (0.5, 1.6)
"""Times its gradients that one of several ranks may exchange in a step: not never, not twice."""

Wrap = Callable[..., nn.Module]
"""`wrap(model)`, or, where there is more than data parallelism, `wrap(model, layout)`."""


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
    exchanges: float | None
    """Bytes of gradients exchanged in a step, as a multiple of the gradients; 1 is right, and with
    replicated shards up to 1.5. None: activations were added up over ranks, too."""
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """All within the tolerance (NaN is not), and gradients exchanged once a step."""
        worst = (self.loss, self.grad_norm, self.gradients, self.weights)
        if not all(difference <= self.tolerance for difference in worst):
            return False
        if self.world_size == 1 or self.exchanges is None:
            return True
        return ONCE[0] < self.exchanges < ONCE[1]


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
            sent = "" if one.exchanges is None else f"{one.exchanges:.1f} ×"
            lines.append((str(one.rank), *shown, sent, verdict))
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
    parallel: ParallelConfig | None = None,
    model: ModelConfig = PROOF_MODEL,
    config: TrainConfig = PROOF_CONFIG,
    steps: int = 3,
    tolerance: float = TOLERANCE,
) -> Proof:
    """Train on every rank of the pool and beside it in one process, and compare.

    `wrap(model)` gives back a wrapper that averages gradients over all ranks. With `parallel`,
    `wrap(model, layout)` finds the meshes of its axes in `layout`, and what it gives back averages
    over the data- and context-parallel ranks.
    """
    case = {"model": model, "config": config, "steps": steps, "tolerance": tolerance}
    return Proof(tuple(ranks.run(prove_on_rank, wrap, parallel=parallel, **case)))


def prove_on_rank(
    wrap: Wrap,
    *,
    parallel: ParallelConfig | None = None,
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
    is_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    layout = Layout.of_group(dist.group.WORLD)
    place: list[Layout] = []
    if parallel is not None:
        layout = Layout.build(parallel, device_type=device.type)
        place = [layout]
    case: dict[str, Any] = {"model": model, "config": config, "steps": steps, "device": device}
    oracle = train_alone(wrap_alone, dp_size=layout.dp_size, **case)
    run = train_in(layout, lambda model: wrap(model, *place), **case)
    return compare(run, oracle, layout=layout, tolerance=tolerance)


def compare(
    run: TrainedRun, oracle: TrainedRun, *, layout: Layout, tolerance: float = TOLERANCE
) -> RankProof:
    """How far a rank's run is from the one-process run."""
    gradient_bytes = sum(g.numel() * g.element_size() for g in oracle.gradients[-1].values())
    only_gradients = layout.tp_size == layout.cp_size == 1
    return RankProof(
        rank=layout.rank,
        world_size=layout.world_size,
        loss=largest_difference(_named(run.losses), _named(oracle.losses)),
        grad_norm=largest_difference(_named(run.grad_norms), _named(oracle.grad_norms)),
        gradients=largest_difference(_named_by_step(run), _named_by_step(oracle)),
        weights=largest_difference(run.weights, oracle.weights),
        exchanges=run.exchanged_bytes / gradient_bytes if only_gradients else None,
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
