"""The emulated link delivers the right sum, as late as such a link would, and blocks nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from labsupport import RankError, Ranks
from labsupport.measure.emulated_link import emulated_link

SIZE_BYTES, RATE, LATENCY_S = 2**20, 2**20 / 0.1, 0.02
TIME_S = LATENCY_S + 0.1  # two ranks: 2(n-1)/n = 1


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=4) as ranks:
        yield ranks


def times(late_s: float = 0.0) -> dict[str, float]:
    """On a rank: seconds until each of three messages has arrived, and until the call was back."""
    import time

    tensors = [torch.full((SIZE_BYTES // 4,), float(dist.get_rank() + 1)) for _ in range(3)]
    with emulated_link(bytes_per_s=RATE, latency_s=LATENCY_S):
        dist.barrier()
        start = time.monotonic()
        time.sleep(late_s if dist.get_rank() == 1 else 0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:2]]
        found = {"called": time.monotonic() - start, "early": works[0].is_completed()}
        for i, work in enumerate(works):
            work.wait()
            found[f"message {i}"] = time.monotonic() - start
        assert dist.all_reduce(tensors[2]) is None
        found["blocking"] = time.monotonic() - start
    assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in tensors)
    return found


def test_messages_take_their_time_one_after_the_other(two: Ranks) -> None:
    for found in two.run(times):
        assert found["called"] < TIME_S
        assert not found["early"]
        for i, name in enumerate(("message 0", "message 1", "blocking")):
            least = (i + 1) * TIME_S
            assert least - 0.01 <= found[name] <= least + 0.1


def test_a_message_begins_when_the_last_rank_has_come(two: Ranks) -> None:
    for found in two.run(times, late_s=0.3):
        assert 0.3 + TIME_S - 0.01 <= found["message 0"] <= 0.3 + TIME_S + 0.1


def test_a_rank_that_does_not_come_is_an_error_not_a_hang(two: Ranks) -> None:
    def on_rank() -> None:
        with emulated_link(bytes_per_s=1e9):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(4))

    with pytest.raises(RankError):
        two.run(on_rank, deadline_s=20)


def test_a_speed_of_nothing_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="bytes_per_s=0 must be positive"),
        emulated_link(bytes_per_s=0),
    ):
        pass
