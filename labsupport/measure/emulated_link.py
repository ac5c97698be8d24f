"""A slow link under real all-reduces: what would this step look like with a network between ranks?

    an all-reduce of S bytes over n ranks takes    latency + 2(n-1)/n · S / bandwidth

    with emulated_link(bytes_per_s=125e6):          # on every rank: 1 Gb/s
        work = dist.all_reduce(gradient, async_op=True)
        …                                           # the CPU is free while the message "travels"
        work.wait()

The ranks of one machine exchange the bytes through memory, with the CPU's help, in no time. Here
the exchange is real, but it counts as arrived only when a link of the given speed would have
delivered it: one message at a time, beginning when the last rank has joined. What is measured
under it is `emulated`. `measure.nodes` has a real slow link, where the machine allows one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class _Message(NamedTuple):
    tensor: Tensor
    work: dist.Work
    joined: Tensor
    """When the last rank came, once `joined_work` is done."""
    joined_work: dist.Work
    time_s: float
    arrived: torch.futures.Future[list[Tensor]]


class SlowWork:
    """What an all-reduce under `emulated_link` gives back; as `torch.distributed.Work`."""

    def __init__(self, arrived: torch.futures.Future[list[Tensor]]) -> None:
        self._arrived = arrived

    def wait(self, timeout: object = None) -> bool:
        """Until the message has arrived, by the link's clock."""
        self._arrived.wait()
        return True

    def is_completed(self) -> bool:
        """Has it arrived?"""
        return self._arrived.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done when it arrives."""
        return self._arrived


@contextmanager
def emulated_link(*, bytes_per_s: float, latency_s: float = 0.0) -> Iterator[None]:
    """Inside, `dist.all_reduce` of this rank takes the time of such a link.

    Open it on every rank of the groups that are used, and outside of `record_trace`. On a GPU it
    does nothing: messages there pass the GPU's own links. Raises ValueError for a speed that is not
    positive or a negative latency.
    """
    if not bytes_per_s > 0 or latency_s < 0:
        raise ValueError(
            f"{bytes_per_s=} must be positive and {latency_s=} not negative; 125e6 and 0 work"
        )
    messages: queue.Queue[_Message | None] = queue.Queue()
    wire = threading.Thread(target=_deliver, args=(messages,), name="emulated link", daemon=True)
    original = dist.all_reduce

    @wraps(original)
    def slow_all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if tensor.is_cuda:
            return original(tensor, op, group, async_op)
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        joined_work = original(now, dist.ReduceOp.MAX, group, async_op=True)
        work = original(tensor, op, group, async_op=True)
        n, size_bytes = dist.get_world_size(group), tensor.numel() * tensor.element_size()
        time_s = latency_s + 2 * (n - 1) / n * size_bytes / bytes_per_s
        arrived: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        messages.put(_Message(tensor, work, now, joined_work, time_s, arrived))
        if async_op:
            return SlowWork(arrived)
        arrived.wait()
        return None

    wire.start()
    setattr(dist, "all_reduce", slow_all_reduce)  # noqa: B010
    try:
        yield
    finally:
        setattr(dist, "all_reduce", original)  # noqa: B010
        messages.put(None)
        wire.join()


def _deliver(messages: queue.Queue[_Message | None]) -> None:
    """The wire: one message after the other, each as long as it takes."""
    free_s = 0.0
    while (message := messages.get()) is not None:
        try:
            message.joined_work.wait()
            free_s = max(free_s, message.joined.item()) + message.time_s
            message.work.wait()
            time.sleep(max(0.0, free_s - time.monotonic()))
            message.arrived.set_result([message.tensor])
        except (
            Exception
        ) as error:  # a rank that does not come: told where the message is waited for
            message.arrived.set_exception(error)  # type: ignore[arg-type]
