"""Where do the bytes of a training step go, from the first to the last?

Below autograd, every operation passes `__torch_dispatch__`. There each new tensor's memory is noted
once, and again when it is freed. What it *is* shows in how it is used:

    in model.parameters(), .grad, optimizer.state       parameters, gradients, optimizer
    made of a parameter, as many numbers (autocast)     copies
    last dimension is the vocabulary                    logits
    made in the forward pass, there when backward starts    activations
    everything else                                     temporary

    with MemoryTracker(model, optimizer) as memory:
        train_step(model, optimizer, batches, config=config, step=0)
    memory.timeline()                                   # a table; see memory_timeline.py

It counts the bytes of tensors, to the byte what torch.profiler counts on a CPU, for programs that
run eagerly. Unseen are a kernel's workspace and the random state that checkpointing saves (5 KB a
block). On a GPU the allocator and the driver are read besides. It costs some 50 µs an operation:
half as long again for a step of the tiny model on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.measure.memory_timeline import (
    AllocatorReading,
    Event,
    Holding,
    MemoryTimeline,
    replay,
)


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Open it around training steps of `model` with `optimizer`; then ask for the `timeline()`.

    A step begins with a call of `model` and ends with `optimizer.step()`, or with the gradients set
    to None where that was skipped; several forward and backward passes before are accumulation.
    `head` is the projection to the vocabulary; left out, the module called lm_head, if there is
    one. No other layer must be as wide.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, head: nn.Module | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizer = model, optimizer
        self._device = next(model.parameters()).device
        heads = (m for name, m in model.named_modules() if name.endswith("lm_head"))
        weight = getattr(head or next(heads, None), "weight", None)
        self._vocab_size = 0 if weight is None else weight.shape[0]
        self._step, self._phase = 1, "before"
        self._held: dict[int, Holding] = {}
        self._events: list[Event] = []
        self._recorded: list[Holding] = []  # by a forward pass whose backward has not begun
        self._readings: list[AllocatorReading] = []
        self._hooks = ExitStack()

    def timeline(self) -> MemoryTimeline:
        """What was seen until now."""
        self._name_states()
        return MemoryTimeline(replay(self._events), tuple(self._readings))

    def __enter__(self) -> Self:
        self._name_states()
        for hook in (
            self._model.register_forward_pre_hook(self._forward_begins),
            self._optimizer.register_step_pre_hook(lambda *_: self._enter_phase("update")),
            self._optimizer.register_step_post_hook(lambda *_: self._enter_phase("after")),
        ):
            self._hooks.callback(hook.remove)
        self._enter_phase("before")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._phase == "after":
            self._rename("activations", "buffers")
        self._enter_phase(self._phase)
        self._hooks.close()

    # ---- where in the step are we? -----------------------------------------------------------

    def _forward_begins(self, *_: object) -> None:
        has_gradients = any(param.grad is not None for param in self._model.parameters())
        if self._phase == "after" or (self._phase == "update" and not has_gradients):
            self._step += 1
            self._rename("activations", "buffers")  # it outlived its step: no graph keeps it
        self._rename("temporary", "inputs")  # the batch, made since the last step
        self._recorded.clear()
        self._enter_phase("forward")

    def _follow(self, *, in_backward: bool) -> None:
        """Backward begins and ends without a hook of its own: its operations tell."""
        if in_backward and self._phase != "backward":
            self._enter_phase("backward")
        elif self._phase == "backward" and not in_backward:
            self._enter_phase("update")

    def _enter_phase(self, phase: str) -> None:
        self._name_states()
        if self._device.type == "cuda":
            self._readings.append(_read_allocator(self._step, self._phase, self._device))
        self._phase = phase
        self._events.append(Event(self._step, phase, None, 0))

    # ---- what is held? -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as the plain tensor inside
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward)
        # Recomputation runs within the backward pass, with gradients switched on.
        recording = torch.is_grad_enabled() if in_backward else self._phase == "forward"
        if in_backward and not recording:
            self._keep_recorded()
        for tensor in _tensors((args, kwargs)):
            if _key(tensor) not in self._held:  # made elsewhere
                is_bucket = self._phase in ("backward", "update")  # and then it was there before
                self._note(tensor, "buffers" if is_bucket else "inputs", first=is_bucket)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((result,)):
            if _key(tensor) not in self._held:
                category = self._category(tensor, args, recording=recording)
                holding = self._note(tensor, category)
                if recording and holding.category == "temporary":
                    self._recorded.append(holding)
        return result

    def _category(self, made: Tensor, args: tuple[Any, ...], *, recording: bool) -> str:
        """What can be said of a tensor at its birth."""
        sources = [tensor for tensor in _tensors(args) if tensor.numel() > 1]  # a scale may help
        if recording and sources and sources[0].numel() == made.numel():
            kinds = {self._held[_key(tensor)].category for tensor in sources}
            if kinds <= {"parameters", "copies"}:
                return "copies"
        is_logits = made.ndim > 1 and made.shape[-1] == self._vocab_size
        return "logits" if is_logits else "temporary"

    def _note(self, tensor: Tensor, category: str, *, first: bool = False) -> Holding:
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == self._device.type
        holding = Holding(storage.nbytes() if on_device else 0, category)
        self._held[storage._cdata] = holding
        event = Event(self._step, self._phase, holding, 1)
        self._events.insert(0 if first else len(self._events), event)
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        return holding

    def _forget(self, key: int) -> None:
        holding = self._held.pop(key)
        holding.alive = False
        self._events.append(Event(self._step, self._phase, holding, -1))

    def _rename(self, category: str, other: str) -> None:
        for holding in list(self._held.values()):  # a copy: garbage may be freed meanwhile
            if holding.category == category:
                holding.category = other

    def _keep_recorded(self) -> None:
        """Backward goes on: what a forward pass made and is still there was kept for it."""
        for holding in self._recorded:
            if holding.alive and holding.category == "temporary":
                holding.category = "activations"
        self._recorded.clear()

    def _name_states(self) -> None:
        """What belongs to the model or the optimizer, whenever it was made."""
        params = list(self._model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        for category, tensors in (
            ("buffers", list(self._model.buffers())),
            ("parameters", params),
            ("gradients", grads),
            ("optimizer", list(self._optimizer.state.values())),
        ):
            for tensor in _tensors(tensors):
                held = self._held.get(_key(tensor)) or self._note(tensor, category)
                held.category = category


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts; of a sharded one what this rank holds."""
    for value in values:
        if isinstance(value, DTensor):
            yield value.to_local()
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _key(tensor: Tensor) -> int:
    """Of the memory: tensors that share it are counted once."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _read_allocator(step: int, phase: str, device: torch.device) -> AllocatorReading:
    """What the phase that ends now has done; the peak starts again."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    reading = AllocatorReading(
        step=step,
        phase=phase,
        allocated_bytes=torch.cuda.memory_allocated(device),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=reserved_bytes,
        non_torch_bytes=total_bytes - free_bytes - reserved_bytes,
    )
    torch.cuda.reset_peak_memory_stats(device)
    return reading
