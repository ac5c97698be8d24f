"""What counts as exposed on given spans, and a recorded step in which sleep stands for compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from labsupport import Ranks
from labsupport.measure.emulated_link import emulated_link
from labsupport.measure.trace import (
    COMMUNICATION,
    COMPUTE,
    Interval,
    Span,
    Trace,
    record_trace,
    subtract,
    unite,
)
from labsupport.measure.trace.kernels import Kernel, spans_of_kernels
from labsupport.measure.trace.recorder import blocks_of
from labsupport.model import Llama
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.hand_ddp import BucketedDDP, OverlappedDDP
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, proof_batches, train


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=10) as ranks:
        yield ranks


# ---- given spans -------------------------------------------------------------------------------


def span(stream: Any, start_s: float, end_s: float, *, rank: int = 0, name: str = "") -> Span:
    return Span(rank=rank, stream=stream, name=name, start_s=start_s, end_s=end_s)


def test_exposed_is_what_no_computation_covers() -> None:
    """compute ████░░██ (0-4, 6-8), messages 3-5 and 4.5-7 and 9-10 -> exposed 4-6 and 9-10."""
    rank_0 = [
        span(COMPUTE, 100, 104),
        span(COMPUTE, 106, 108),
        span(COMMUNICATION, 103, 105),
        span(COMMUNICATION, 104.5, 107),
        span(COMMUNICATION, 109, 110),
    ]
    rank_1 = [span(COMPUTE, 101, 103, rank=1)]
    trace = Trace.of_ranks([rank_0, rank_1])
    assert trace.exposed(0) == [(4, 6), (9, 10)]
    assert (trace.exposed_s(0), trace.communication_s(0), trace.compute_s(0)) == (3, 5, 6)
    assert trace.hidden_share(0) == pytest.approx(0.4)
    assert (trace.exposed_s(1), trace.hidden_share(1), trace.duration_s) == (0, 0, 10)
    assert trace.ranks == (0, 1)
    assert repr(trace).splitlines()[1].split() == [
        *["0", "6000.0", "ms", "5000.0", "ms"],
        *["3000.0", "ms", "40%"],
    ]
    with pytest.raises(ValueError, match="no spans were recorded"):
        Trace.of_ranks([[], []])


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def cells(spans: list[Interval]) -> set[int]:
    return {cell for start, end in spans for cell in range(int(start), int(end))}


@given(intervals, intervals)
def test_interval_arithmetic_is_that_of_sets(a: list[Interval], b: list[Interval]) -> None:
    united = unite(a)
    assert cells(united) == cells(a)
    assert all(before[1] < after[0] for before, after in pairwise(united))
    assert cells(subtract(united, unite(b))) == cells(a) - cells(b)


def test_kernels_of_a_gpu_become_spans() -> None:
    kernels = [
        Kernel("ampere_sgemm", 0, 10_000),
        Kernel("elementwise", 15_000, 30_000),  # 5 µs later: still the same stretch
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20_000, 90_000),
        Kernel("ampere_sgemm", 80_000, 100_000),
    ]
    trace = Trace(tuple(spans_of_kernels(kernels, rank=3)))
    assert [(s.start_s, s.end_s) for s in trace.spans if s.stream == COMPUTE] == [
        (0, pytest.approx(30e-6)),
        (pytest.approx(80e-6), pytest.approx(100e-6)),
    ]
    assert trace.exposed_s(3) == pytest.approx(50e-6)


# ---- recorded ----------------------------------------------------------------------------------

BLOCKS, FORWARD_S, BACKWARD_S, MESSAGE_S = 4, 0.005, 0.03, 0.02
BLOCK_BYTES = 8192


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        import time

        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        import time

        time.sleep(BACKWARD_S)
        return grad


class SleepyBlock(nn.Module):
    """Takes the time of a computation without the CPU; its gradient comes at the end of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(BLOCK_BYTES // 4))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight)


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepyBlock() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def one_step(wrap: Any) -> list[Span]:
    """On a rank: a step of a sleepy model over a link that takes MESSAGE_S for each block."""
    model = wrap(Sleepy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with emulated_link(bytes_per_s=BLOCK_BYTES / MESSAGE_S), record_trace(model) as recorder:
        model(torch.ones(BLOCK_BYTES // 4)).sum().backward()
        getattr(model, "finish_gradient_sync", lambda: None)()
        optimizer.step()
    return recorder.spans


def by_block(wrap: Any) -> Any:
    return lambda model: wrap(model, bucket_bytes=BLOCK_BYTES)


def test_overlap_hides_all_messages_but_the_last(two: Ranks) -> None:
    before = Trace.of_ranks(two.run(one_step, by_block(BucketedDDP)))
    after = Trace.of_ranks(two.run(one_step, by_block(OverlappedDDP)))
    for rank in (0, 1):
        messages = [s for s in after.spans if (s.rank, s.stream) == (rank, COMMUNICATION)]
        assert [s.size_bytes for s in messages] == [BLOCK_BYTES] * BLOCKS
        assert before.hidden_share(rank) == pytest.approx(0, abs=0.01)
        assert before.exposed_s(rank) >= 0.99 * BLOCKS * MESSAGE_S
        assert 0.9 * MESSAGE_S <= after.exposed_s(rank) <= 2 * MESSAGE_S
        assert after.compute_s(rank) >= 0.99 * BLOCKS * (FORWARD_S + BACKWARD_S)
    assert after.duration_s < before.duration_s


def test_names_say_what_was_done(two: Ranks) -> None:
    spans = two.run(one_step, by_block(OverlappedDDP))[0]
    names = [s.name for s in spans if s.stream == COMPUTE and s.duration_s > 0.8 * FORWARD_S]
    forward = [f"layers.{i} forward" for i in range(BLOCKS)]
    backward = [f"layers.{i} backward" for i in reversed(range(BLOCKS))]
    assert names == forward + backward
    assert "optimizer" in {s.name for s in spans}
    assert [name for name, _ in blocks_of(Llama(PROOF_MODEL))] == [
        *["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    ]


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_torchs_own_are_seen_too_and_compute_the_same(two: Ranks, wrap: Any) -> None:
    def losses(traced: bool) -> tuple[list[float], set[str]]:
        model = wrap(Llama(PROOF_MODEL))
        batches = [proof_batches(0, config=PROOF_CONFIG, world_size=1)] * 2
        group = dist.group.WORLD
        if not traced:
            return train(model, batches, config=PROOF_CONFIG, group=group).losses, set()
        with record_trace(model) as recorder:
            run = train(model, batches, config=PROOF_CONFIG, group=group)
        kinds = {s.name for s in recorder.spans if s.stream == COMMUNICATION}
        return run.losses, kinds

    plain, _ = two.run(losses, False)[0]
    seen, kinds = two.run(losses, True)[0]
    assert seen == plain
    expected = {data_parallel: {"all_reduce"}}
    assert kinds == expected.get(wrap, {"all_gather_single", "reduce_scatter_single"})


def test_the_collectives_are_put_back(two: Ranks) -> None:
    def on_rank() -> bool:
        before = dist.all_reduce
        model = data_parallel(nn.Linear(2, 2))
        with emulated_link(bytes_per_s=1e9), record_trace(model), record_trace(model):
            assert dist.all_reduce is not before
        return dist.all_reduce is before and not model.module._forward_hooks

    assert two.run(on_rank) == [True, True]
