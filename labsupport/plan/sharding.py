"""What does each rank hold when the states of training are sharded, and what travels instead?

                parameters   gradients   optimizer    a ring sends, in (n-1)/n of the gradients
    ddp             P            P           O        all-reduce                            2
    zero1           P            P           O/n      reduce-scatter, all-gather        1 + 1
    zero2           P            P/n         O/n      reduce-scatter, all-gather        1 + 1
    zero3, fsdp     P/n          P/n         O/n      reduce-scatter, all-gather twice  1 + 2

    plan = shard(shapes_of(ModelConfig.named("1b")), stage="zero3", world_size=8)
    plan.fullest.total_bytes, plan.exchanged_bytes, plan.link_bytes

Rows are divided as `ParameterShape` says. Our own ZeRO leaves a parameter with fewer rows than
ranks whole on every rank; torch's fully_shard (fsdp, hsdp) divides it all the same, and some ranks
have none of it. A block is gathered twice, the root, whole from forward to backward, once.
Activations are not in here, and none of this divides them. Nor are padding in memory and the byte
a parameter with which our ranks tell each other what they used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from labsupport.config import MixedPrecision, Optimizer
from labsupport.plan.activations import RECIPES, Recipe
from labsupport.plan.communication import (
    Collective,
    all_gather,
    predict,
    reduce_scatter,
    ring_all_reduce,
)
from labsupport.plan.gradient_sync import Link
from labsupport.plan.parameter_shapes import ParameterShape

Stage = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_COSTS: dict[str, Collective] = {
    "all_reduce": ring_all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
}


@dataclass(frozen=True, kw_only=True)
class HeldByRank:
    """Bytes of one rank's states as its backward pass ends: all are there. Label: predicted."""

    parameters_bytes: int
    """What the optimizer changes, and what is frozen."""
    gradients_bytes: int
    optimizer_bytes: int
    """There from the end of the first step."""
    copies_bytes: int
    """zero1, zero2: whole weights in a narrower type of computation, kept beside the shards."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(vars(self).values())

    @property
    def bytes_of(self) -> Mapping[str, int]:
        """Category -> bytes, named as in measure.memory_timeline."""
        return {name.removesuffix("_bytes"): num_bytes for name, num_bytes in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one rank hands to one collective in a step; whole tensors, as nccl-tests count."""

    collective: str
    size_bytes: int
    """Of all calls together."""
    calls: int
    num_ranks: int
    """That take part."""

    @property
    def link_bytes(self) -> float:
        """What a ring makes this rank send."""
        cost = _COSTS[self.collective]
        return cost(size_bytes=self.size_bytes, world_size=self.num_ranks).link_bytes

    def time_s(self, link: Link) -> float:
        """Call after call on a link of one latency and one bandwidth."""
        cost = _COSTS[self.collective](
            size_bytes=self.size_bytes / self.calls, world_size=self.num_ranks
        )
        one = predict(
            cost, latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
        )
        return self.calls * one.total_s


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """One stage on some number of ranks. Label: predicted, from the shapes alone."""

    stage: Stage
    world_size: int
    gathered_bytes: int
    """zero3, fsdp, hsdp: whole weights beside the shards, at most, in a forward pass: the root's,
    and those of a block; of all blocks where none is resharded."""
    exchanges: tuple[Exchange, ...]
    case: _Case = field(repr=False)

    @cached_property
    def held(self) -> tuple[HeldByRank, ...]:
        """One a rank."""
        of_a_copy = [self.case.held(rank) for rank in range(self.case.ranks)]
        return tuple(of_a_copy * self.case.replicas)

    @cached_property
    def fullest(self) -> HeldByRank:
        """The rank that holds most, and that is the first: a device must be large enough for it."""
        return self.case.held(0)

    @property
    def exchanged_bytes(self) -> Mapping[str, int]:
        """Collective -> bytes handed to it in a step."""
        found: dict[str, int] = {}
        for one in self.exchanges:
            found[one.collective] = found.get(one.collective, 0) + one.size_bytes
        return found

    @property
    def link_bytes(self) -> float:
        """What a rank sends in a step, in rings."""
        return sum(one.link_bytes for one in self.exchanges)

    def time_s(self, link: Link) -> float:
        """All exchanges on `link`, one after the other, nothing hidden behind computation."""
        return sum(one.time_s(link) for one in self.exchanges)


def shard(
    shapes: Sequence[ParameterShape],
    *,
    stage: Stage,
    world_size: int,
    replicate_size: int = 1,
    precision: MixedPrecision = "fp32",
    optimizer: Optimizer = "adamw",
    momentum: float = 0.9,
    reshard_after_forward: bool = True,
    gradient_accumulation_steps: int = 1,
) -> ShardingPlan:
    """Bytes that each of `world_size` ranks holds, and what a step exchanges.

    hsdp divides over world_size / replicate_size ranks and holds that so many times. Raises
    ValueError for an unknown stage or precision, and for sizes that do not go together.
    """
    for name, value, known in (("stage", stage, STAGES), ("precision", precision, tuple(RECIPES))):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    if min(world_size, replicate_size, gradient_accumulation_steps) < 1:
        raise ValueError(
            f"{world_size=}, {replicate_size=} and {gradient_accumulation_steps=} must all be at "
            f"least 1, for example 8, 1 and 1"
        )
    if world_size % replicate_size or (replicate_size > 1 and stage != "hsdp"):
        raise ValueError(
            f"{replicate_size=} must divide {world_size=}, and is for hsdp only; for example "
            f"stage='hsdp', world_size=8, replicate_size=2"
        )
    case = _Case(
        stage=stage,
        ranks=world_size // replicate_size,
        replicas=replicate_size,
        recipe=RECIPES[precision],
        shapes=tuple(shapes),
        moments=2 if optimizer == "adamw" else int(momentum > 0),
        step_bytes=4 if optimizer == "adamw" else 0,
        reshards=reshard_after_forward,
        micro_batches=gradient_accumulation_steps,
    )
    return ShardingPlan(
        stage=stage,
        world_size=world_size,
        gathered_bytes=case.gathered_bytes(),
        exchanges=tuple(one for one in case.exchanges() if one.calls and one.num_ranks > 1),
        case=case,
    )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The settings of `shard`, and what follows from them."""

    stage: Stage
    ranks: int
    """That divide one copy."""
    replicas: int
    recipe: Recipe
    shapes: tuple[ParameterShape, ...]
    moments: int
    """Numbers that the optimizer keeps for each one that it changes."""
    step_bytes: int
    """Of its count of steps, for each tensor."""
    reshards: bool
    micro_batches: int

    @property
    def divides_weights(self) -> bool:
        return self.stage in ("zero3", "fsdp", "hsdp")

    @property
    def is_by_hand(self) -> bool:
        return self.stage in ("zero1", "zero2", "zero3")

    @property
    def trained(self) -> list[ParameterShape]:
        return [shape for shape in self.shapes if shape.trained]

    def is_divided(self, shape: ParameterShape) -> bool:
        """Over the ranks, as far as this stage divides anything."""
        return self.stage != "ddp" and (not self.is_by_hand or shape.shape[0] >= self.ranks)

    def mine(self, shapes: Iterable[ParameterShape], rank: int) -> int:
        """Numbers of `rank`: its rows, or all where they are not divided."""
        return sum(
            shape.numel_of_rank(rank, self.ranks) if self.is_divided(shape) else shape.numel
            for shape in shapes
        )

    def held(self, rank: int) -> HeldByRank:
        width, whole, changed = self.recipe.parameter_bytes, _numel(self.shapes), self.trained
        divides_gradients = self.stage not in ("ddp", "zero1")
        numbers, copies = self.mine(self.shapes, rank) if self.divides_weights else whole, 0
        if self.recipe.casts and self.stage in ("zero1", "zero2"):
            numbers, copies = self.mine(self.shapes, rank), whole * self.recipe.compute_bytes
        steps = self.step_bytes * len(changed)
        return HeldByRank(
            parameters_bytes=numbers * width,
            gradients_bytes=(self.mine(changed, rank) if divides_gradients else _numel(changed))
            * width,
            optimizer_bytes=self.moments * self.mine(changed, rank) * width + steps,
            copies_bytes=copies,
        )

    def gathered_bytes(self) -> int:
        if not self.divides_weights or self.ranks == 1:
            return 0
        units: dict[str, int] = {}
        for shape in filter(self.is_divided, self.shapes):
            units[shape.unit] = units.get(shape.unit, 0) + shape.numel
        root = units.pop("", 0)
        blocks = max(units.values(), default=0) if self.reshards else sum(units.values())
        return (root + blocks) * self.recipe.compute_bytes

    def exchanges(self) -> list[Exchange]:
        """Gradients are added up once a step; weights are gathered after it, or for each use."""
        wide, narrow = self.recipe.parameter_bytes, self.recipe.compute_bytes
        divided = [shape for shape in self.trained if self.is_divided(shape)]
        whole = [shape for shape in self.trained if not self.is_divided(shape)]
        sums = self._padded("reduce_scatter", divided, wide)
        found = [
            Exchange(
                collective="all_reduce",
                size_bytes=_numel(whole) * wide,
                calls=len({shape.unit for shape in whole}),
                num_ranks=self.ranks,
            ),
            sums,
            Exchange(
                collective="all_reduce",
                size_bytes=sums.size_bytes // self.ranks,
                calls=sums.calls,
                num_ranks=self.replicas,
            ),
        ]
        if not self.divides_weights:
            return [*found, self._padded("all_gather", divided, narrow)]
        used = [shape for shape in self.shapes if self.is_divided(shape)]
        again = [shape for shape in used if shape.unit and self.reshards]
        for uses in (used, again):  # forward, backward; the root stays whole in between
            found.append(self._padded("all_gather", uses, narrow, times=self.micro_batches))
        return found

    def _padded(
        self, collective: str, shapes: Sequence[ParameterShape], width: int, *, times: int = 1
    ) -> Exchange:
        """In pieces of equal length; one call a tensor by hand, one a unit in fully_shard."""
        return Exchange(
            collective=collective,
            size_bytes=times * sum(shape.padded_numel(self.ranks) for shape in shapes) * width,
            calls=times * (len(shapes) if self.is_by_hand else len({s.unit for s in shapes})),
            num_ranks=self.ranks,
        )


def _numel(shapes: Iterable[ParameterShape]) -> int:
    return sum(shape.numel for shape in shapes)
