"""All ranks together draw each sample once, in another order each epoch, and end together."""

import itertools
import time
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from labsupport import RankError, Ranks
from labsupport.sampler import EvaluationSampler, ShardedSampler, while_all_have, worker_share


def drawn(total, world_size, *, epoch=0, **kind):
    """The ids of each rank."""
    samplers = [
        ShardedSampler(range(total), rank=rank, world_size=world_size, **kind)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    ids = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in ids]
    return ids


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_ids_are_disjoint_and_complete(total, world_size, seed, epoch):  # T10
    kind = {"seed": seed, "epoch": epoch}
    uneven = drawn(total, world_size, **kind, ending="uneven")
    assert Counter(itertools.chain(*uneven)) == Counter(range(total))
    assert max(map(len, uneven)) - min(map(len, uneven)) <= 1

    padded = drawn(total, world_size, **kind, ending="pad")
    assert {len(part) for part in padded} == {-(-total // world_size)}
    assert set(itertools.chain(*padded)) == set(range(total))

    if total >= world_size:
        dropped = drawn(total, world_size, **kind, ending="drop")
        assert {len(part) for part in dropped} == {total // world_size}
        once = Counter(itertools.chain(*dropped))
        assert set(once.values()) == {1}
        assert once.total() == total - total % world_size


def test_epochs_differ_and_runs_repeat():  # T9
    first, second, again = (drawn(40, 2, epoch=epoch, seed=5) for epoch in (0, 1, 0))
    assert first == again != second
    assert drawn(40, 2, seed=6) != first


def test_what_is_dropped_is_not_the_same_in_every_epoch():
    left_out = {
        min(set(range(9)) - set(itertools.chain(*drawn(9, 2, epoch=epoch)))) for epoch in range(12)
    }
    assert len(left_out) > 3


def test_a_forgotten_set_epoch_is_noticed():  # T9
    sampler = ShardedSampler(range(10), rank=0, world_size=2)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 0 is drawn again, .* call set_epoch\(1\) on"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)
        assert list(sampler) != first
        sampler.set_epoch(1)
        assert list(sampler) != first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_of_all_ranks_see_every_sample_once(num_workers):
    data = list(range(100, 123))
    seen = []
    for rank in range(2):
        sampler = ShardedSampler(data, rank=rank, world_size=2, ending="uneven")
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=num_workers)
        seen += torch.cat(list(loader)).tolist()
    assert Counter(seen) == Counter(data)


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_evaluation_counts_each_sample_once(world_size):
    samplers = [
        EvaluationSampler(range(23), rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    ids = [list(sampler) for sampler in samplers]
    assert Counter(itertools.chain(*ids)) == Counter(range(23))
    assert [len(sampler) for sampler in samplers] == [len(part) for part in ids]
    assert list(samplers[0]) == ids[0] == sorted(ids[0])


class Lines(IterableDataset):
    """A stream that every worker of every rank reads from the start."""

    def __init__(self, rank, world_size, share=worker_share):
        self.rank, self.world_size, self.share = rank, world_size, share

    def __iter__(self):
        return self.share(iter(range(50)), rank=self.rank, world_size=self.world_size)


def everything(**share):
    return Counter(
        item
        for rank in range(2)
        for batch in DataLoader(Lines(rank, 2, **share), batch_size=4, num_workers=2)
        for item in batch.tolist()
    )


def test_a_stream_is_shared_by_ranks_and_workers_without_repeats():  # T10
    assert everything() == Counter(range(50))
    alone = [list(worker_share(range(50), rank=rank, world_size=3)) for rank in range(3)]
    assert Counter(itertools.chain(*alone)) == Counter(range(50))


def by_rank_only(items, *, rank, world_size):
    return itertools.islice(items, rank, None, world_size)


def test_the_proof_can_fail_for_a_stream_that_forgets_its_workers():
    assert everything(share=by_rank_only) == Counter(dict.fromkeys(range(50), 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardedSampler([1], rank=2, world_size=2), "rank=2 must lie in 0…world_size - 1"),
        (lambda: EvaluationSampler([1], rank=-1, world_size=2), "rank=-1 must lie in"),
        (lambda: worker_share([1], rank=1, world_size=1), "rank=1 must lie in"),
        (
            lambda: ShardedSampler([1], rank=0, world_size=1, ending="cut"),
            "ending='cut' is unknown; choose one of drop, pad, uneven",
        ),
        (
            lambda: ShardedSampler([1], rank=0, world_size=2),
            "a dataset of 1 gives 2 ranks nothing with ending='drop'; it must hold at least 2",
        ),
        (lambda: ShardedSampler([], rank=0, world_size=2, ending="pad"), "at least 1"),
    ],
)
def test_samplers_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- T11: a rank with one batch more ------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    with Ranks(2, threads_per_rank=1, collective_timeout_s=4) as ranks:
        yield ranks


def steps_with_a_collective(batches):
    sums = []
    for batch in batches:
        total = torch.tensor(batch)
        dist.all_reduce(total)
        sums.append(total.item())
    return sums


@pytest.mark.parametrize("counts", [(3, 2), (2, 4), (0, 1), (2, 2)])
def test_ranks_end_together(two, counts):
    def run():
        mine = range(counts[dist.get_rank()])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sums = steps_with_a_collective(while_all_have(mine))
        dist.barrier()
        return sums, [str(warning.message) for warning in said]

    start = time.monotonic()
    results = two.run(run)
    assert time.monotonic() - start < 30
    few = min(counts)
    assert [sums for sums, _ in results] == [[2 * i for i in range(few)]] * 2
    ended = counts.index(few)
    for rank, (_, said) in enumerate(results):
        leaves = [f"rank {ended} has no batch left after {few}; rank {rank} leaves out"]
        expected = leaves if counts[rank] > few else []
        assert [text[: len(leaves[0])] for text in said] == expected


def test_without_ranks_nothing_is_left_out():
    assert list(while_all_have(range(3))) == [0, 1, 2]


def test_the_proof_can_fail_without_it(two):
    with pytest.raises(RankError):
        two.run(lambda: steps_with_a_collective(range(3 - dist.get_rank())))
