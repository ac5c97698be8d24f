"""At which moments of a step do weights and gradients move?

    forward         a unit begins: its weights are needed       it ends: they were used
    backward        a unit begins: needed again                 a gradient has arrived
    backward ends   gradients that have not left yet are exchanged

A unit is what is gathered together: the whole model (stages 1 and 2), or a block (stage 3). While
it runs, its whole weights stand in its parameters' places, under their names; else the shards do.
So any module runs as it is, recomputation in the backward included, and an optimizer of any class
gets the shards. The stages fill in what is sent:

    class Zero1(Sharding):
        def gather(self, piece): …          # rows of all ranks -> piece.buffer
        def exchange(self, piece): …        # gradients of all ranks -> piece.received
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from labsupport.parallel.agree import send_first_weights, used_on_any_rank
from labsupport.parallel.zero.prepare import cut_whole_weights, places_of
from labsupport.parallel.zero.shards import Piece


class Unit:
    """A module and the parameters that are gathered when it runs."""

    def __init__(self, module: nn.Module, pieces: Sequence[Piece]) -> None:
        self.module = module
        self.pieces = pieces
        self.is_open = False
        """The whole weights are in place."""


class EndOfBackward:
    """The engine calls it when a backward ends, and throws it away when a backward has failed."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding: Sharding | None = sharding

    def __call__(self) -> None:
        sharding, self._sharding = self._sharding, None
        assert sharding is not None
        sharding._backward_ends()

    def __del__(self) -> None:
        if self._sharding is not None:
            self._sharding._backward_failed()


class Sharding:
    """A model over the ranks of a 1-D mesh: knows the moments, leaves the messages to a stage."""

    keeps_whole: bool
    """Whole weights stay in memory between the moments."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None
    ) -> None:
        self.group, self.num_ranks = mesh.get_group(), mesh.size()
        send_first_weights(model, self.group)
        kind: Any = {"compute_dtype": compute_dtype, "keeps_whole": self.keeps_whole}
        self.pieces = [Piece(p, at, mesh=mesh, **kind) for p, at in places_of(model).items()]
        self.units = self.cut_into_units(model)
        """The first is the model itself."""
        self.waiting: deque[Piece] = deque()
        """Not yet exchanged in this backward. Collectives are matched by their order: every rank
        sends in this one, about that in which a backward finishes gradients: the last first."""
        self.in_backward = False
        self._turns = self.pieces[::-1]
        self._compute_dtype = compute_dtype
        self._syncs, self._is_owed = True, False
        self._watch(model)

    # ---- for the stages to fill in ------------------------------------------------------------

    def cut_into_units(self, model: nn.Module) -> list[Unit]:
        """What is gathered together: here everything."""
        return [Unit(model, self.pieces)]

    def gather(self, piece: Piece) -> None:
        """From the rows of all ranks to the whole weight, `piece.buffer`, on each."""
        raise NotImplementedError

    def weights_were_used(self, unit: Unit) -> None:
        """A forward or a backward has left the unit: here its whole weights stay."""

    def gradient_has_arrived(self) -> None:
        """One more of `waiting` is ready: here it waits for the end of the backward."""

    def exchange(self, piece: Piece) -> None:
        """From every rank's whole gradient to each rank's rows of the mean, `piece.received`."""
        raise NotImplementedError

    # ---- what the model is given --------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to this rank's whole gradients and send none."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish_gradient_sync(self) -> None:
        """Exchange what backward passes under `no_sync()` have left; every rank must call it.

        A backward outside does so by itself when it ends, and this then does nothing.
        """
        if self._is_owed:
            self._line_up()
            self._exchange_all()

    # ---- forward ------------------------------------------------------------------------------

    def _forward_begins(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit is self.units[0] and self._compute_dtype is not None:
            args, kwargs = tree_map(self._narrowed, (args, kwargs))
        self._open(unit)
        return args, kwargs

    def _forward_ends(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> None:
        if not self.in_backward:  # recomputation runs inside the backward, which closes the unit
            self._close(unit)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and output is not None and not tensors:
            raise TypeError(
                f"{type(module).__name__} returned {type(output).__name__}, in which no tensor was "
                f"found to begin the backward at; return tensors, or tuples, lists, dicts of them"
            )
        for tensor in tensors:
            if tensor.requires_grad:
                reached: Any = partial(self._backward_reaches, unit)
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def _narrowed(self, value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._compute_dtype) if is_wide else value

    # ---- backward -----------------------------------------------------------------------------

    def _backward_reaches(self, unit: Unit, _: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(EndOfBackward(self))
            if self._syncs:
                self._line_up()
            self._open(self.units[0])
        for other in self.units[1:]:  # a backward is in one block at a time
            if other is not unit:
                self._close(other)
        self._open(unit)

    def _gradient_is_ready(self, piece: Piece) -> None:
        """Autograd has just added up all contributions to `piece.whole.grad`."""
        piece.take_gradient()
        if not self._syncs:
            piece.show_pending()
            return
        if piece not in self.waiting:
            raise RuntimeError(
                "a gradient came twice in one backward, after it had been exchanged; use "
                "checkpoint(…, use_reentrant=False), which runs a single backward"
            )
        piece.is_ready = True
        self.gradient_has_arrived()

    def _backward_ends(self) -> None:
        self._leave_backward()
        if self._syncs:
            self._exchange_all()
        else:
            self._is_owed = True

    def _backward_failed(self) -> None:
        self._leave_backward()
        for piece in self.pieces:
            piece.forget_gradient()

    def _leave_backward(self) -> None:
        for unit in self.units:
            self._close(unit)
        self.in_backward = False

    def _line_up(self) -> None:
        self.waiting = deque(piece for piece in self._turns if piece.shard.requires_grad)

    def _exchange_all(self) -> None:
        while self.waiting:
            self.exchange(self.waiting.popleft())
        trained = [piece for piece in self._turns if piece.shard.requires_grad]
        arrived, device = [piece.has_arrived for piece in trained], self.pieces[0].own.device
        # If no rank has a gradient it stays None, as in one process.
        flags = used_on_any_rank(arrived, self.group, device=device)
        used = dict(zip(trained, flags, strict=True))
        for piece, is_used in used.items():
            piece.hand_over(is_used=is_used)
        self._turns.sort(key=lambda piece: not used.get(piece, True))  # nobody waits for them again
        self._is_owed = False

    # ---- whole weights and shards take turns ---------------------------------------------------

    def _open(self, unit: Unit) -> None:
        if unit.is_open:
            return
        # Between the micro batches of a step, and in a backward, weights are what they were.
        are_same = self.in_backward or self._is_owed
        for piece in unit.pieces:
            if piece.is_free or (not are_same and piece.may_have_changed()):
                piece.allocate()
                self.gather(piece)
            piece.show(piece.whole)
        unit.is_open = True

    def _close(self, unit: Unit) -> None:
        if not unit.is_open:
            return
        for piece in unit.pieces:
            piece.show(piece.shard)
        unit.is_open = False
        self.weights_were_used(unit)

    def _watch(self, model: nn.Module) -> None:
        for piece in self.pieces:
            piece.show(piece.shard)
            if piece.whole.is_floating_point():
                self._listen(piece)
        for unit in self.units:
            begins, ends = partial(self._forward_begins, unit), partial(self._forward_ends, unit)
            unit.module.register_forward_pre_hook(begins, with_kwargs=True)
            unit.module.register_forward_hook(ends, always_call=True)
        load: Any = self._whole_weights_come
        model.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]

    def _whole_weights_come(
        self, model: nn.Module, state: dict[str, Any], prefix: str, how: dict[str, Any], *_: Any
    ) -> None:
        if how.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) would replace the shards; use assign=False"
            )
        self._is_owed = False  # they may be others than those of the last micro batch
        cut_whole_weights(self.pieces, model, state, prefix)

    def _listen(self, piece: Piece) -> None:
        """Autograd holds this hook where Python's collector cannot look: it keeps nothing alive."""
        its_sharding, its_piece = weakref.ref(self), weakref.ref(piece)

        def ready(_: Tensor) -> None:
            sharding, piece = its_sharding(), its_piece()
            if sharding is not None and piece is not None:
                sharding._gradient_is_ready(piece)

        piece.whole.requires_grad_(True)  # a frozen one too: it may be trained later
        piece.whole.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
