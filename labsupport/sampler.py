"""Which samples does a DataLoader of rank r draw, so that all ranks together see each one once?

    order of epoch e = a shuffle drawn from (seed, e), the same on all ranks
    rank r of N      = every N-th of that order, from the r-th on

    sampler = ShardedSampler(dataset, rank=rank, world_size=2, seed=0)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    sampler.set_epoch(epoch)                # before each epoch: another order, one for all

Ranks that seed their own shuffle see some samples twice and others never. A rank with one batch
more than the others would wait for them for ever: `while_all_have` ends all ranks together.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Literal, TypeVar

import torch
from torch import distributed
from torch.utils.data import Sampler, get_worker_info

from labsupport.data import shuffled

Ending = Literal["drop", "pad", "uneven"]
Item = TypeVar("Item")


class ShardedSampler(Sampler[int]):
    """This rank's part of every epoch, by index; `seed` must be the same on all ranks.

    `ending` says what happens to the samples that N ranks cannot share equally: "drop" leaves them
    out (others in each epoch), "pad" repeats the first ones of the order, "uneven" gives some ranks
    one more. Raises ValueError for a rank, an ending or a dataset that cannot be.
    """

    def __init__(
        self, dataset: Sized, *, rank: int, world_size: int, seed: int = 0, ending: Ending = "drop"
    ) -> None:
        _check_rank(rank, world_size)
        if ending not in ("drop", "pad", "uneven"):
            raise ValueError(f"{ending=} is unknown; choose one of drop, pad, uneven")
        fewest = {"drop": world_size, "pad": 1, "uneven": 0}[ending]
        if len(dataset) < fewest:
            raise ValueError(
                f"a dataset of {len(dataset)} gives {world_size} ranks nothing with {ending=}; "
                f"it must hold at least {fewest}, or use ending='uneven'"
            )
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.seed, self.ending, self.epoch = seed, ending, 0
        self._is_drawn = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass over the data; the same `epoch` on every rank."""
        self.epoch, self._is_drawn = epoch, False

    def __iter__(self) -> Iterator[int]:
        if self._is_drawn:
            warnings.warn(
                f"epoch {self.epoch} is drawn again, in the same order; call "
                f"set_epoch({self.epoch + 1}) on every rank before the next pass",
                stacklevel=2,
            )
        self._is_drawn = True
        order = shuffled(len(self.dataset), seed=self.seed, epoch=self.epoch)
        if self.ending != "uneven":
            equal = len(self) * self.world_size
            order = list(itertools.islice(itertools.cycle(order), equal))
        return iter(order[self.rank :: self.world_size])

    def __len__(self) -> int:
        total = len(self.dataset)
        if self.ending == "drop":
            return total // self.world_size
        if self.ending == "pad":
            return -(-total // self.world_size)
        return len(range(self.rank, total, self.world_size))


class EvaluationSampler(Sampler[int]):
    """In order, each sample on exactly one rank, none repeated: for sums over the whole dataset.

    Ranks may get unequal numbers: add up sums and counts over ranks after the loop, no means, and
    let no collective run inside it (or use `while_all_have` and lose the end).
    """

    def __init__(self, dataset: Sized, *, rank: int, world_size: int) -> None:
        _check_rank(rank, world_size)
        self._ids = range(rank, len(dataset), world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def worker_share(items: Iterable[Item], *, rank: int, world_size: int) -> Iterator[Item]:
    """Of a stream that all ranks and DataLoader workers read alike, the part of this one.

    For `__iter__` of an IterableDataset, of which every worker holds a copy: worker w of W on rank
    r takes every N·W-th item from the (r·W + w)-th on, so nobody repeats another's.
    """
    _check_rank(rank, world_size)
    worker = get_worker_info()
    index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
    return itertools.islice(items, rank * workers + index, None, world_size * workers)


def while_all_have(
    batches: Iterable[Item],
    *,
    group: distributed.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Item]:
    """Batches as long as every rank of `group` has one; then all ranks end, in the same step.

    One all-reduce of 8 bytes a step, on `device` (that of the ranks under nccl). A rank that had
    more warns what it left out. Without a process group: all batches.
    """
    if not distributed.is_initialized():
        yield from batches
        return
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    iterator = iter(batches)
    for step in itertools.count():
        mine = list(itertools.islice(iterator, 1))
        # MIN over ranks of "who has none left": 8 bytes to all and from all
        ended = torch.tensor(world_size if mine else rank, device=device)
        distributed.all_reduce(ended, op=distributed.ReduceOp.MIN, group=group)
        if int(ended) < world_size:
            if mine:
                warnings.warn(
                    f"rank {int(ended)} has no batch left after {step}; rank {rank} leaves out "
                    f"the rest of its own",
                    stacklevel=2,
                )
            return
        yield mine[0]


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank=} must lie in 0…world_size - 1, {world_size=}, for example rank=0")
