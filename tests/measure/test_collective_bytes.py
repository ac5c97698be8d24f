"""Bytes handed to collectives, also by torch's DDP and FSDP, against a count by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from labsupport import Ranks
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.hand_ddp import PerTensorDDP
from labsupport.train.proof_run import PROOF_MODEL

GRADIENT_BYTES = 4 * PROOF_MODEL.num_params


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=10) as ranks:
        yield ranks


def test_direct_calls(two: Ranks) -> None:
    def on_rank() -> tuple[dict[str, list[int]], int, int]:
        with count_collective_bytes() as counted:
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(2), async_op=True).wait()
            dist.all_gather_single(torch.ones(6), torch.ones(3))
            dist.reduce_scatter_single(torch.ones(1), torch.ones(2))
            dist.broadcast(torch.ones(3), 0)
        dist.all_reduce(torch.ones(100))
        return counted.sizes_bytes, counted.calls, counted.gradient_bytes

    sizes = {"allreduce": [16, 8], "allgather": [24], "reduce_scatter": [8], "broadcast": [12]}
    assert two.run(on_rank) == [(sizes, 5, 32)] * 2


def test_of_dtensor(two: Ranks) -> None:
    """DTensor's own operators, which give back new tensors: named and sized like the others."""

    def on_rank() -> tuple[dict[str, list[int]], int]:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        part = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()])
        with count_collective_bytes() as counted:
            rows.full_tensor()
            part.redistribute(placements=[Shard(0)])
            part.full_tensor()
            torch.relu(part)  # an operator that needs the finished sum
        return counted.sizes_bytes, counted.gradient_bytes

    sizes = {"allgather": [48], "reduce_scatter": [48], "allreduce": [48, 48]}
    assert two.run(on_rank) == [(sizes, 144)] * 2


def test_of_a_backward(two: Ranks) -> None:
    def on_rank(wrap: Any) -> tuple[int, int]:
        model = wrap(Llama(PROOF_MODEL))
        with count_collective_bytes() as counted:
            model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
            getattr(model, "finish_gradient_sync", lambda: None)()
        return counted.gradient_bytes, counted.total_bytes

    flags = len(list(Llama(PROOF_MODEL).parameters()))
    assert two.run(on_rank, data_parallel) == [(GRADIENT_BYTES, GRADIENT_BYTES)] * 2
    by_hand = (GRADIENT_BYTES + flags,) * 2
    assert two.run(on_rank, PerTensorDDP) == [by_hand] * 2
    # FSDP: blocks are gathered twice, the root (kept after the forward) once.
    blocks = 4 * sum(p.numel() for p in Llama(PROOF_MODEL).model.layers.parameters())
    assert two.run(on_rank, fully_sharded) == [(GRADIENT_BYTES, 2 * GRADIENT_BYTES + blocks)] * 2
