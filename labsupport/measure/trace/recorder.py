"""How is one training step written down, block by block and message by message?

    with record_trace(model) as recorder:
        train_step(model, optimizer, micro_batches, …)
    recorder.spans              # of this rank; `Trace.of_ranks` lays those of all side by side

On the CPU hooks note when a block starts forward or backward and when the optimizer steps; the
collectives of `torch.distributed` are wrapped, and a message ends when its future says so. That
takes microseconds a block. torch's DDP talks below Python, so it is given torch's own communication
hook, which does the same from Python (and stays). A GPU works behind the program's back: there the
profiler's kernels are read instead (`measure.trace.kernels`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from labsupport.measure.trace.kernels import record_kernels
from labsupport.measure.trace.spans import COMMUNICATION, COMPUTE, Span, Stream

COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single")
SMALL_BYTES = 1024
LAST_MESSAGES_S = 10.0


class Recorder:
    """Collects the spans of this rank while `record_trace` is open."""

    def __init__(self, *, rank: int, at_least_bytes: int = SMALL_BYTES) -> None:
        self.rank = rank
        self.at_least_bytes = at_least_bytes
        self._spans: list[Span] = []
        self._doing: tuple[str, float] | None = None
        self._last_gradient_s = 0.0
        self._under_way = 0
        self._changed = threading.Condition()  # messages end on a thread of gloo

    @property
    def spans(self) -> list[Span]:
        """What was recorded, by start."""
        return sorted(self._spans, key=lambda span: span.start_s)

    def now_doing(self, name: str | None) -> None:
        """A rank computes one thing at a time: what it did ends now, `name` begins."""
        self._end_doing(time.monotonic())
        self._doing = None if name is None else (name, time.monotonic())

    def gradient_is_there(self) -> None:
        """The backward has finished a parameter: perhaps its last act."""
        self._last_gradient_s = time.monotonic()

    def backward_is_over(self) -> None:
        """It ended with its last gradient; what came after was waiting."""
        if self._doing is not None and self._last_gradient_s > self._doing[1]:
            self._end_doing(self._last_gradient_s)
        self.now_doing(None)

    def follow(self, name: str, size_bytes: int, start_s: float, work: dist.Work | None) -> None:
        """A message was handed over; without `work` it has arrived already."""
        if size_bytes < self.at_least_bytes:
            return
        if work is None:
            self._add(COMMUNICATION, name, start_s, time.monotonic(), size_bytes)
            return

        def arrived(_: object) -> None:
            end_s = time.monotonic()
            with self._changed:
                self._add(COMMUNICATION, name, start_s, end_s, size_bytes)
                self._under_way -= 1
                self._changed.notify_all()

        with self._changed:
            self._under_way += 1
        work.get_future().then(arrived)

    def wait_for_messages(self) -> None:
        """Until every message that was followed has arrived. Raises RuntimeError after 10 s."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._under_way == 0, LAST_MESSAGES_S):
                raise RuntimeError(
                    f"{self._under_way} messages had not arrived {LAST_MESSAGES_S:g} s after the "
                    "end of the recording; finish the step inside record_trace"
                )

    def _end_doing(self, end_s: float) -> None:
        if self._doing is not None:
            self._add(COMPUTE, *self._doing, end_s)
        self._doing = None

    def _add(
        self, stream: Stream, name: str, start_s: float, end_s: float, size_bytes: int = 0
    ) -> None:
        when = {"start_s": start_s, "end_s": end_s}
        span = Span(rank=self.rank, stream=stream, name=name, size_bytes=size_bytes, **when)
        self._spans.append(span)


@contextmanager
def record_trace(model: nn.Module, *, at_least_bytes: int = SMALL_BYTES) -> Iterator[Recorder]:
    """Record what this rank computes in `model` and its optimizer, and what it sends.

    Messages below `at_least_bytes` (token counts, flags) are left out on the CPU.
    """
    recorder = Recorder(rank=dist.get_rank(), at_least_bytes=at_least_bytes)
    if next(model.parameters()).is_cuda:
        with record_kernels(rank=recorder.rank) as recorder._spans:
            yield recorder
        return
    if isinstance(model, DistributedDataParallel) and not hasattr(model, "_is_traced"):
        model.register_comm_hook(model.process_group, allreduce_hook)
        setattr(model, "_is_traced", True)  # noqa: B010  (the hook can be given only once)
    with ExitStack() as stack:
        for handle in _compute_hooks(model, recorder):
            stack.callback(handle.remove)
        for name in COLLECTIVES:
            stack.enter_context(_followed(name, recorder))
        yield recorder
        recorder.backward_is_over()
        recorder.wait_for_messages()


def blocks_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Parts to tell apart: members of a list of layers, and what lies beside the list."""
    for name, child in model.named_children():
        own = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from ((f"{name}.{i}", layer) for i, layer in child.named_children())
        elif any(isinstance(part, nn.ModuleList) for part in child.modules()):
            yield from blocks_of(child, own)
        else:
            yield name, child


def _compute_hooks(model: nn.Module, recorder: Recorder) -> Iterator[Any]:
    """Hooks on blocks, parameters and optimizers; each handle has a `remove`."""
    root: nn.Module = getattr(model, "module", model)

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            recorder.backward_is_over()
            recorder.now_doing(name)

        return hook

    yield root.register_forward_pre_hook(begin("forward"))
    for name, block in blocks_of(root):
        yield block.register_forward_pre_hook(_say(recorder, f"{name} forward"))
        yield block.register_forward_hook(_announce_backward(recorder, name))
    yield root.register_forward_hook(_say(recorder, "loss"))
    for param in root.parameters():
        if param.requires_grad:
            hook = param.register_post_accumulate_grad_hook
            yield hook(lambda _: recorder.gradient_is_there())  # type: ignore[no-untyped-call]
    yield register_optimizer_step_pre_hook(begin("optimizer"))
    yield register_optimizer_step_post_hook(_say(recorder, None))


def _say(recorder: Recorder, name: str | None) -> Callable[..., None]:
    return lambda *_: recorder.now_doing(name)


def _announce_backward(recorder: Recorder, name: str) -> Callable[..., None]:
    """A forward hook: the block's backward begins when the gradient of its output is there."""

    def hook(_module: nn.Module, _args: object, output: object) -> None:
        recorder.now_doing("forward")
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(  # type: ignore[no-untyped-call]
                _say(recorder, f"{name} backward")
            )

    return hook


@contextmanager
def _followed(name: str, recorder: Recorder) -> Iterator[None]:
    """`dist.<name>`, with the recorder told of every call."""
    original = getattr(dist, name)

    @wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        work = original(*args, **kwargs)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        size_bytes = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        recorder.follow(name, size_bytes, start_s, work)
        return work

    setattr(dist, name, followed)
    try:
        yield
    finally:
        setattr(dist, name, original)
