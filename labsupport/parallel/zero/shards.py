"""How does one parameter lie on n ranks?

    8 rows on 3 ranks      rank 0: 0 1 2     rank 1: 3 4 5     rank 2: 6 7 (·)

    piece = Piece(param, places, mesh=mesh, compute_dtype=None, keeps_whole=True)
    piece.shard      # what the optimizer sees: a parameter, this rank's rows of it
    piece.whole      # what forward and backward see: a parameter, all rows, in the compute dtype

Rows are split as `torch.chunk` does, and the shard is a DTensor: it knows what it is a part of.
All ranks send equally much, so the last ones fill up with zeros (·): padding travels, and counts.
A parameter with fewer rows than ranks is not split: every rank holds all of it. Nothing is sent
from here; what travels is in stage1, and when, in stage2 and stage3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Place = tuple[nn.Module, str]


class Piece:
    """One parameter of the model under all its names: a tied one is one piece."""

    def __init__(
        self,
        param: nn.Parameter,
        places: Sequence[Place],
        *,
        mesh: DeviceMesh,
        compute_dtype: torch.dtype | None,
        keeps_whole: bool,
    ) -> None:
        """`keeps_whole`: the whole weight stays in memory; in the same dtype it holds the rows."""
        self.places = places
        num_ranks, num_rows = mesh.size(), param.shape[0] if param.ndim else 0
        self.is_split = param.ndim > 0 and num_rows >= num_ranks
        self.rows_per_rank = -(-num_rows // num_ranks) if self.is_split else num_rows
        self._padding = num_ranks * self.rows_per_rank - num_rows if self.is_split else 0
        self._start = mesh.get_local_rank() * self.rows_per_rank if self.is_split else 0
        self._num_own = max(0, min(self.rows_per_rank, num_rows - self._start))
        self._mesh, self._placements = mesh, [Shard(0) if self.is_split else Replicate()]

        values = self._padded(param.detach().contiguous())  # (num_ranks · rows_per_rank, …)
        dtype = compute_dtype if compute_dtype and param.is_floating_point() else param.dtype
        shares = dtype == param.dtype and (keeps_whole or not self.is_split)
        self._stays = keeps_whole or shares
        self.buffer = values if shares else values.to(dtype, copy=True)
        """Memory of the whole weight and its padding."""
        # `.data`: autograd, which watches saved weights, need not know that they are filled again.
        whole = self.buffer.data.narrow(0, 0, num_rows) if self.is_split else self.buffer.data
        self.whole = nn.Parameter(whole, param.requires_grad)
        self.own = self.own_rows(values) if shares else self.own_rows(values).clone()
        """This rank's rows and padding, in the dtype of the model: (rows_per_rank, …)."""
        self.shard = nn.Parameter(self._as_part(self.own), param.requires_grad)

        self.pending: Tensor | None = None
        """Whole gradient of this rank in the dtype of the model, not yet exchanged."""
        self.is_ready = False
        """The backward that is to be exchanged has finished `pending`."""
        self.has_arrived = False
        """A backward of this rank has computed a gradient since the last exchange."""
        self.received: Tensor | None = None
        """Rows of the mean gradient over all ranks: (rows_per_rank, …)."""
        self._shown: DTensor | None = None
        """This rank's rows of `pending`, while they stand as the gradient of the shard."""
        self._whole_bytes = self.buffer.untyped_storage().nbytes()
        self._gathered_version = self.shard._version
        self.free()

    # ---- weights ------------------------------------------------------------------------------

    def own_rows(self, padded: Tensor) -> Tensor:
        """This rank's part, a view: (num_ranks · rows_per_rank, …) -> (rows_per_rank, …)."""
        return padded.narrow(0, self._start, self.rows_per_rank) if self.is_split else padded

    def part_of(self, whole: Tensor) -> DTensor:
        """This rank's shard of a tensor of the parameter's shape."""
        return self._as_part(self.own_rows(self._padded(whole.to(self.own.device))))

    def show(self, param: nn.Parameter) -> None:
        """Put `param`, the shard or the whole, in its places in the model."""
        param.requires_grad_(self.shard.requires_grad)
        for module, name in self.places:
            setattr(module, name, param)  # not in _parameters: an LSTM keeps a list besides

    def allocate(self) -> None:
        """Memory for the whole weight, where there is none."""
        if self.is_free:  # resize_ moves the memory, even to the length that it has
            self.buffer.untyped_storage().resize_(self._whole_bytes)

    def free(self) -> None:
        """Give it back: what autograd saved of the weight is empty until it is filled again."""
        if not self._stays:
            self.buffer.untyped_storage().resize_(0)

    @property
    def is_free(self) -> bool:
        return self.buffer.untyped_storage().nbytes() < self._whole_bytes

    def may_have_changed(self) -> bool:
        """Frozen rows stay, unless an operator in place, as in `load_state_dict`, was there."""
        return self.shard.requires_grad or self.shard._version != self._gathered_version

    def rows_to_send(self) -> Tensor:
        """What the shard holds, padded, in the dtype of the whole weight: (rows_per_rank, …)."""
        assert isinstance(self.shard, DTensor)
        rows = self.shard.to_local().detach()
        if rows.data_ptr() != self.own.data_ptr():  # other rows were put in their place
            self._as_part(self.own).to_local().copy_(rows)
        self._gathered_version = self.shard._version
        return self.own.to(self.buffer.dtype)

    # ---- gradients ----------------------------------------------------------------------------

    def take_gradient(self) -> None:
        """What autograd has left at the whole weight is added to `pending`."""
        assert self.whole.grad is not None
        self._forget_if_cleared()
        gradient = self.whole.grad.to_dense().to(self.shard.dtype)
        self.whole.grad = None
        self.pending = gradient if self.pending is None else self.pending.add_(gradient)
        self.has_arrived = True

    def show_pending(self) -> None:
        """Let its rows stand as the shard's gradient: then `zero_grad()` clears it, as anywhere."""
        assert self.pending is not None
        if self.shard.grad is None:
            rows = self.pending[self._start :] if self.is_split else self.pending
            self.shard.grad = self._shown = self._as_part(rows)

    def gradient_to_send(self) -> Tensor:
        """`pending`, padded, or zeros if no backward came here: (num_ranks · rows_per_rank, …)."""
        self._forget_if_cleared()
        gradient, self.pending, self.is_ready = self.pending, None, False
        if gradient is None:
            gradient = self.own.new_zeros(self.whole.shape, dtype=self.shard.dtype)
        return self._padded(gradient.contiguous())

    def forget_gradient(self) -> None:
        """Of a backward that failed, or of a step that was given up."""
        self.pending, self.received, self.has_arrived, self.is_ready = None, None, False, False
        self._hide_pending()

    def hand_over(self, *, is_used: bool) -> None:
        """Add `received` to the gradient of the shard, unless no rank has used the parameter."""
        received, self.received, self.has_arrived = self.received, None, False
        assert received is not None
        self._hide_pending()
        if not is_used:
            return
        part = self._as_part(received)
        if isinstance(self.shard.grad, DTensor):
            self.shard.grad.to_local().add_(part.to_local())
        else:
            self.shard.grad = part

    def _hide_pending(self) -> None:
        if self._shown is not None and self.shard.grad is self._shown:
            self.shard.grad = None
        self._shown = None

    def _forget_if_cleared(self) -> None:
        if self._shown is not None and self.shard.grad is None:
            self.forget_gradient()

    def _as_part(self, rows: Tensor) -> DTensor:
        """What this rank's rows, without the padding, are a part of."""
        return DTensor.from_local(
            rows.narrow(0, 0, self._num_own) if self.is_split else rows,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self.whole.shape,
            stride=self.whole.stride(),
        )

    def _padded(self, rows: Tensor) -> Tensor:
        if not self._padding:
            return rows
        return torch.cat((rows, rows.new_zeros(self._padding, *rows.shape[1:])))
