"""Where do the bytes of a training step go, from the first to the last?

Below autograd, every operation passes `__torch_dispatch__`. There each new tensor's memory is noted
once, and again when it is freed. What it *is* shows in how it is used:

    in model.parameters(), .grad, optimizer.state       parameters, gradients, optimizer
    a parameter of which the model has only a shard     gathered, for as long as it has memory
    made of a parameter, as many numbers (autocast)     copies
    last dimension is the vocabulary                    logits
    made in the forward pass, there when backward starts    activations
    everything else                                     temporary

    with MemoryTracker(model, optimizer) as memory:
        train_step(model, optimizer, batches, config=config, step=0)
    memory.timeline()                                   # a table; see memory_timeline.py

It counts the bytes of tensors, to the byte what torch.profiler counts on a CPU, for programs that
run eagerly; of sharded tensors those that this rank holds. Unseen are a kernel's workspace, what a
communication library allocates, and the random state that checkpointing saves (5 KB a block). On a
GPU the allocator and the driver are read besides. It costs some 50 µs an operation: half as long
again for a step of the tiny model on a CPU.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from labsupport.measure.memory_tensors import (
    key_of,
    parameters_in,
    read_allocator,
    tensors_in,
    watch_resizes,
)
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
        self._head = head or next(heads, None)
        weight = getattr(self._head, "weight", None)
        self._vocab_size = 0 if weight is None else weight.shape[0]
        self._step, self._phase = 1, "before"
        self._held: dict[int, Holding] = {}
        self._events: list[Event] = []
        self._unseen: list[Event] = []  # made where no operation told; perhaps long ago
        self._recorded: list[Holding] = []  # by a forward pass whose backward has not begun
        self._readings: list[AllocatorReading] = []
        self._whole = WeakIdKeyDictionary()  # parameters in place of shards -> None
        self._hooks = ExitStack()

    def timeline(self) -> MemoryTimeline:
        """What was seen until now."""
        self._name_states()
        return MemoryTimeline(replay(self._events), tuple(self._readings))

    def __enter__(self) -> Self:
        self._name_states()
        for hook in (
            self._model.register_forward_pre_hook(self._forward_begins, prepend=True),
            self._optimizer.register_step_pre_hook(lambda *_: self._enter_phase("update")),
            self._optimizer.register_step_post_hook(lambda *_: self._enter_phase("after")),
        ):
            self._hooks.callback(hook.remove)
        if self._head is not None:
            self._hooks.callback(self._head.register_forward_hook(self._name_logits).remove)
        self._hooks.enter_context(watch_resizes(self._resized))
        self._enter_phase("before")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._phase == "after":
            self._name_buffers()
        self._enter_phase(self._phase)
        self._hooks.close()

    # ---- where in the step are we? -----------------------------------------------------------

    def _forward_begins(self, *_: object) -> None:
        has_gradients = any(param.grad is not None for param in self._model.parameters())
        if self._phase == "after" or (self._phase == "update" and not has_gradients):
            self._step += 1
            self._name_buffers()
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
            self._readings.append(read_allocator(self._step, self._phase, self._device))
        self._phase = phase
        self._events.append(Event(self._step, phase, None, 0))

    # ---- what is held? -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for param in parameters_in((args, kwargs)):
            self._see_parameter(param)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as the plain tensor inside
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward)
        # Recomputation runs within the backward pass, with gradients switched on.
        recording = torch.is_grad_enabled() if in_backward else self._phase == "forward"
        if in_backward and not recording:
            self._keep_recorded()
        for tensor in tensors_in((args, kwargs)):
            if key_of(tensor) not in self._held:  # made elsewhere
                is_late = self._phase in ("backward", "update")
                self._note(tensor.untyped_storage(), "temporary" if is_late else "inputs")
                self._unseen.append(self._events[-1])
            if func.namespace == "fsdp" and self._held[key_of(tensor)].category == "temporary":
                self._held[key_of(tensor)].category = "buffers"
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((result,)):
            if key_of(tensor) not in self._held:
                category = self._category(tensor, args, recording=recording)
                holding = self._note(tensor.untyped_storage(), category)
                if recording and holding.category == "temporary":
                    self._recorded.append(holding)
        return result

    def _category(self, made: Tensor, args: tuple[Any, ...], *, recording: bool) -> str:
        """What can be said of a tensor at its birth."""
        sources = [tensor for tensor in tensors_in(args) if tensor.numel() > 1]  # a scale may help
        if recording and sources and sources[0].numel() == made.numel():
            kinds = {self._held[key_of(tensor)].category for tensor in sources}
            if kinds <= {"parameters", "copies", "gathered"}:
                return "copies"
        is_logits = made.ndim > 1 and made.shape[-1] == self._vocab_size
        return "logits" if is_logits else "temporary"

    def _see_parameter(self, param: nn.Parameter) -> None:
        """One that is not the model's stands in a shard's place; so does its gradient."""
        (local,) = tensors_in((param,))
        holding = self._held.get(key_of(local))
        if holding is None:  # there since before the first step
            holding = self._note(local.untyped_storage(), "copies")
            self._unseen.append(self._events[-1])
        elif holding.category in ("temporary", "inputs"):
            holding.category = "gathered" if holding.category == "temporary" else "copies"
        is_shards = holding.category in ("parameters", "optimizer")
        if param.requires_grad and not is_shards and param not in self._whole:
            self._whole[param] = None
            hook: Any = param.register_hook(self._name_gradient)  # type: ignore[no-untyped-call]
            self._hooks.callback(hook.remove)

    def _name_gradient(self, gradient: Tensor) -> None:
        for tensor in tensors_in((gradient,)):
            if (holding := self._held.get(key_of(tensor))) is not None:
                holding.category = "gradients"

    def _name_logits(self, head: nn.Module, args: Any, output: Any) -> None:
        """Under tensor parallelism a rank's logits are narrower than the vocabulary."""
        for logits in tensors_in((output,)):
            self._vocab_size = logits.shape[-1]
            if (holding := self._held.get(key_of(logits))) is not None:
                holding.category = "logits"

    def _note(self, storage: UntypedStorage, category: str) -> Holding:
        on_device = storage.device.type == self._device.type
        holding = Holding(storage.nbytes() if on_device else 0, category)
        self._held[storage._cdata] = holding
        self._events.append(Event(self._step, self._phase, holding, 1))
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        return holding

    def _resized(self, storage: UntypedStorage) -> None:
        """Freed or allocated again, while tensors point to it: whole weights, used at times."""
        before = self._held.get(storage._cdata) or self._note(storage, "gathered")
        if before.num_bytes == storage.nbytes():
            return
        before.category = "gathered"
        after = self._held[storage._cdata] = Holding(storage.nbytes(), "gathered")
        for holding, sign in ((before, -1), (after, 1)):
            self._events.append(Event(self._step, self._phase, holding, sign))

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

    def _name_buffers(self) -> None:
        """What has outlived its step: no graph keeps it, and no library's message."""
        self._rename("activations", "buffers")
        for event in self._unseen:
            if event.holding is not None and event.holding.alive:  # then it was there before
                self._events.remove(event)
                self._events.insert(0, event)
                if event.holding.category == "temporary":
                    event.holding.category = "buffers"
        self._unseen.clear()

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
            for tensor in tensors_in(tensors):
                held = self._held.get(key_of(tensor)) or self._note(
                    tensor.untyped_storage(), category
                )
                if held.category != "gathered":
                    held.category = category
