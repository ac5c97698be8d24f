"""Broken on purpose: each classic mistake of data parallelism makes the proof of equality fail.

The mistakes are made on the ranks, one at a time, by replacing a function of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from labsupport import RankError, Ranks
from labsupport.parallel import hand_ddp
from labsupport.parallel.ddp import data_parallel
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.hand_ddp import BucketedDDP, HandWrittenDDP, OverlappedDDP, PerTensorDDP
from labsupport.train import step as step_module
from labsupport.train.proof import Proof, RankProof, prove_on_rank

Mistake = Callable[[], AbstractContextManager[None]]
bucketed = partial(BucketedDDP, bucket_bytes=2**13)
overlapped = partial(OverlappedDDP, bucket_bytes=2**13)
BY_HAND = [PerTensorDDP, bucketed, overlapped]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def prove_with(mistake: Mistake | None, wrap: Any) -> RankProof:
    """On a rank: the proof, with a mistake in the code."""
    with nullcontext() if mistake is None else mistake():
        return prove_on_rank(wrap)


def proof(ranks: Ranks, wrap: Any, mistake: Mistake | None = None) -> Proof:
    return Proof(tuple(ranks.run(prove_with, mistake, wrap)))


# ---- the mistakes ------------------------------------------------------------------------------


def one_message_is_forgotten() -> AbstractContextManager[None]:
    """The third gradient message of a step stays at home."""
    send = HandWrittenDDP._all_reduce_mean

    class Nothing:
        def wait(self) -> None:
            pass

    def forgetful(self: HandWrittenDDP, gradient: torch.Tensor) -> Any:
        if self.num_all_reduces % 3 == 2:
            self.num_all_reduces += 1
            return Nothing()
        return send(self, gradient)

    return replaced(HandWrittenDDP, "_all_reduce_mean", forgetful)


def sums_are_not_divided() -> AbstractContextManager[None]:
    def summing(self: HandWrittenDDP, gradient: torch.Tensor) -> Any:
        return dist.all_reduce(gradient, group=self.group, async_op=True)

    return replaced(HandWrittenDDP, "_all_reduce_mean", summing)


def no_broadcast() -> AbstractContextManager[None]:
    return replaced(hand_ddp, "send_first_weights", lambda model, group: None)


def own_tokens_only() -> AbstractContextManager[None]:
    """Each rank divides by its own number of tokens."""
    right = step_module._tell_all

    def local(loss_sum: Any, norm: Any, tokens_here: int, *, group: Any) -> Any:
        loss_sums, norm_of_all, _ = right(loss_sum, norm, tokens_here, group=group)
        ranks = 1 if group is None else dist.get_world_size(group)
        return loss_sums, norm_of_all, tokens_here * ranks

    return replaced(step_module, "_tell_all", local)


def no_sync_forgotten() -> AbstractContextManager[None]:
    return replaced(step_module, "_synchronised", lambda model, *, now: nullcontext())


def no_sync_around_the_last() -> AbstractContextManager[None]:
    """The first backward exchanges gradients, the last one does not."""
    right = step_module._synchronised

    def wrong(model: Any, *, now: bool) -> Any:
        return right(model, now=not now)

    return replaced(step_module, "_synchronised", wrong)


# ---- each is found -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [*BY_HAND, data_parallel, fully_sharded])
def test_without_a_mistake_all_is_equal(two: Ranks, wrap: Any) -> None:
    assert proof(two, wrap).is_equal


@pytest.mark.parametrize("wrap", BY_HAND)
@pytest.mark.parametrize(
    "mistake", [one_message_is_forgotten, sums_are_not_divided, no_broadcast, own_tokens_only]
)
def test_by_hand(two: Ranks, wrap: Any, mistake: Mistake) -> None:
    found = proof(two, wrap, mistake)
    assert not found.is_equal
    assert "NO" in repr(found)


def test_a_wrong_scale_is_seen_in_the_norm_though_clipping_hides_it(two: Ranks) -> None:
    for rank in proof(two, overlapped, sums_are_not_divided).ranks:
        assert rank.grad_norm == pytest.approx(1, rel=1e-3)  # twice as long: off by 100%
        assert rank.weights < 1e-4


def with_hook(hook: Callable[[Any], Any]) -> Callable[[nn.Module], nn.Module]:
    """DDP that does with a full bucket what `hook` says."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = data_parallel(model)
        wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
        return wrapped

    return wrap


def kept(bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def added(bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def without_broadcast(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


def shards_times_two(model: Any) -> nn.Module:
    """What FSDP2 on gloo once did: gradients of the ranks added up, not averaged."""
    sharded = fully_sharded(model)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return sharded


@pytest.mark.parametrize(
    "wrap", [with_hook(kept), with_hook(added), without_broadcast, shards_times_two]
)
def test_torch_used_wrongly(two: Ranks, wrap: Any) -> None:
    assert not proof(two, wrap).is_equal


def root_not_sharded(model: Any) -> nn.Module:
    """Blocks are units, what is outside of them stays as it was: nobody averages its gradients."""
    for block in model.model.layers:
        fully_shard(block)
    model.set_requires_gradient_sync = lambda now: [
        block.set_requires_gradient_sync(now) for block in model.model.layers
    ]
    return model


def gradients_stay_at_home(model: Any) -> nn.Module:
    """No reduce-scatter: each rank keeps its rows of its own gradient."""

    class Own(ReduceScatter):
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
        ) -> None:
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    sharded = fully_sharded(model)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Own())
    return sharded


@pytest.mark.parametrize("wrap", [root_not_sharded, gradients_stay_at_home])
def test_shards_used_wrongly(two: Ranks, wrap: Any) -> None:
    found = proof(two, wrap)
    assert not found.is_equal
    assert all(rank.gradients > 0.01 for rank in found.ranks), found


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_tokens_of_one_rank_only(two: Ranks, wrap: Any) -> None:
    assert not proof(two, wrap, own_tokens_only).is_equal


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_a_forgotten_no_sync_changes_no_number_but_sends_twice(two: Ranks, wrap: Any) -> None:
    found = proof(two, wrap, no_sync_forgotten)
    for rank in found.ranks:
        assert max(rank.loss, rank.grad_norm, rank.gradients, rank.weights) < 1e-5
        assert rank.exchanges == pytest.approx(2, rel=0.01)
    assert not found.is_equal


@pytest.mark.parametrize("mistake", [no_sync_forgotten, no_sync_around_the_last])
def test_the_overlapped_one_refuses_two_backwards(two: Ranks, mistake: Mistake) -> None:
    with pytest.raises(RankError, match=r"but the last under no_sync\(\)"):
        proof(two, overlapped, mistake)


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
def test_no_sync_in_the_wrong_place(two: Ranks, wrap: Any) -> None:
    assert not proof(two, wrap, no_sync_around_the_last).is_equal


def hybrid(model: Any) -> nn.Module:
    axes = ("dp_replicate", "dp_shard")
    return fully_sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=axes))


def copies_never_meet() -> AbstractContextManager[None]:
    """HSDP without its second message: ranks 0 and 2, 1 and 3 do not tell each other."""
    right = dist.all_reduce

    def deaf(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if dist.get_process_group_ranks(group) in ([0, 2], [1, 3]):
            return None
        return right(tensor, *args, group=group, **kwargs)

    return replaced(dist, "all_reduce", deaf)


def test_copies_that_never_meet(four: Ranks) -> None:
    assert proof(four, hybrid).is_equal
    found = proof(four, hybrid, copies_never_meet)
    assert all(rank.gradients > 0.01 for rank in found.ranks), found
