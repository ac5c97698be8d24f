"""Data parallelism by hand: how do N ranks turn N gradients into one, and what does it cost?

    gradient of the global batch = mean over the ranks of the gradients of their parts

    model = OverlappedDDP(Llama(config), bucket_bytes=2**20)   # all ranks hold rank 0's weights
    model(input_ids) … loss.backward()                         # each rank on its own batch
    model.finish_gradient_sync(); optimizer.step()             # the same step on every rank

Three wrappers with one result. All of them call the same all-reduce; what differs is how often, and
what the rank does meanwhile:

    PerTensorDDP    backward ███████ ▫▫▫▫▫▫▫▫▫▫▫▫    one message a tensor, a latency each
    BucketedDDP     backward ███████ ▬▬▬▬ ▬▬▬▬       few long messages, still after the backward
    OverlappedDDP   backward ███████
                              ▬▬▬▬ ▬▬▬▬              the first leave while the backward goes on

Parameters are taken from last to first: that is the order in which a backward finishes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from labsupport.parallel.agree import send_first_weights, used_on_any_rank

BUCKET_BYTES = 25 * 2**20
"""As torch's DDP: long enough that the latency of a message does not matter."""

ORDER_OF_A_STEP = (
    "put all forwards and backwards of a step but the last under no_sync(), and call "
    "finish_gradient_sync() after the last, before optimizer.step()"
)


class HandWrittenDDP(nn.Module):
    """What the three have in common: equal weights at the start, and a forward that passes through.

    Works for any module and any optimizer. Frozen parameters stay at home; a shared one travels
    once. A parameter that got no gradient on this rank counts as zeros in the mean; if no rank has
    one, its `grad` stays None, as in one process. Freeze parameters before you wrap the module.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.trained: list[Parameter] = [p for p in module.parameters() if p.requires_grad][::-1]
        """In the order of the backward: last one first."""
        self.num_all_reduces = 0
        """Messages with gradients since the start."""
        self.sent_bytes = 0
        """Gradient bytes handed to those all-reduces (a ring sends 2(n-1)/n of them)."""
        self._syncs = True
        send_first_weights(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to the local gradients and send nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish_gradient_sync(self) -> None:
        """After the last backward of a step: from here on `grad` is the mean over the ranks."""
        raise NotImplementedError

    def _all_reduce_mean(self, gradient: Tensor) -> dist.Work:
        """Start to replace `gradient` (contiguous) by its mean; valid after `wait()`."""
        gradient /= dist.get_world_size(self.group)
        self.num_all_reduces += 1
        self.sent_bytes += gradient.numel() * gradient.element_size()
        # Every rank sends its gradient and gets the sum: 2(n-1)/n · size in a ring, each way.
        return _started(dist.all_reduce(gradient, group=self.group, async_op=True))

    def _is_used_anywhere(self) -> list[bool]:
        """For each trained parameter: did any rank compute a gradient?"""
        here = [param.grad is not None for param in self.trained]
        device = self.trained[0].device if self.trained else torch.device("cpu")
        return used_on_any_rank(here, self.group, device=device)


class PerTensorDDP(HandWrittenDDP):
    """After the backward, one all-reduce for each gradient: the shortest correct program."""

    def finish_gradient_sync(self) -> None:
        """Average every gradient, one after the other."""
        for param, is_used in zip(self.trained, self._is_used_anywhere(), strict=True):
            if is_used:
                mean = local_gradient(param).contiguous()
                self._all_reduce_mean(mean).wait()
                param.grad = mean


class BucketedDDP(HandWrittenDDP):
    """After the backward, gradients are laid end to end and travel `bucket_bytes` at a time."""

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(module, group=group)
        self.buckets = cut_into_buckets(self.trained, bucket_bytes=bucket_bytes)
        self._in_flight: list[tuple[Tensor, dist.Work]] = []

    def finish_gradient_sync(self) -> None:
        """Send what has not left yet, wait for everything, put the means in place."""
        while len(self._in_flight) < len(self.buckets):
            self._launch_next()
        is_used = dict(zip(self.trained, self._is_used_anywhere(), strict=True))
        for bucket, (flat, work) in zip(self.buckets, self._in_flight, strict=True):
            work.wait()
            pieces = torch.split(flat, [param.numel() for param in bucket])
            for param, mean in zip(bucket, pieces, strict=True):
                param.grad = mean.view_as(param) if is_used[param] else None
        self._in_flight = []

    def _launch_next(self) -> None:
        bucket = self.buckets[len(self._in_flight)]
        flat = torch.cat([local_gradient(param).flatten() for param in bucket])
        self._in_flight.append((flat, self._all_reduce_mean(flat)))


class OverlappedDDP(BucketedDDP):
    """During the backward: a bucket leaves as soon as its last gradient is there.

    Collectives are matched by their order, so all ranks must start them in the same one. Gradients
    may become ready in another order on each rank; a bucket therefore also waits for its turn.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(module, group=group, bucket_bytes=bucket_bytes)
        self._missing = [set(bucket) for bucket in self.buckets]
        me = weakref.WeakMethod(self._gradient_is_ready)  # a wrapper thrown away falls silent
        for i, bucket in enumerate(self.buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(_Notify(me, i))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_flight and self.training:
            raise RuntimeError(f"a forward while gradients are on their way: {ORDER_OF_A_STEP}")
        return super().forward(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Send what waits for a gradient that never came; then wait for everything."""
        super().finish_gradient_sync()
        self._missing = [set(bucket) for bucket in self.buckets]

    def _gradient_is_ready(self, bucket_index: int, param: Parameter) -> None:
        """Autograd has just added the last contribution to `param.grad`."""
        if not self._syncs:
            return
        if param not in self._missing[bucket_index]:
            raise RuntimeError(f"a second backward after gradients have left: {ORDER_OF_A_STEP}")
        self._missing[bucket_index].remove(param)
        while len(self._in_flight) < len(self.buckets) and not self._missing[len(self._in_flight)]:
            self._launch_next()


def cut_into_buckets(
    params: Sequence[Parameter], *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[Parameter]]:
    """Neighbours share a bucket up to `bucket_bytes`; one dtype and device each.

    A tensor larger than that gets a bucket of its own. Raises ValueError for a size below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"{bucket_bytes=} must be at least 1, for example {BUCKET_BYTES}")
    buckets: list[list[Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for param in params:
        kind, size_bytes = (param.dtype, param.device), param.numel() * param.element_size()
        bucket, filled_bytes = open_buckets.get(kind, ([], 0))
        if not bucket or filled_bytes + size_bytes > bucket_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(param)
        open_buckets[kind] = (bucket, filled_bytes + size_bytes)
    return buckets


def local_gradient(param: Parameter) -> Tensor:
    """This rank's share of the mean: zeros where the backward did not reach the parameter."""
    return torch.zeros_like(param) if param.grad is None else param.grad.to_dense()


class _Notify:
    """A hook that keeps neither the wrapper nor its buckets alive."""

    def __init__(self, method: weakref.WeakMethod[Any], bucket_index: int) -> None:
        self._method = method
        self._bucket_index = bucket_index

    def __call__(self, param: Tensor) -> None:
        method = self._method()
        if method is not None:
            method(self._bucket_index, param)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
