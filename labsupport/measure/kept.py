"""Which operator made what autograd keeps, and what would it cost to make it again?

    cost of forgetting an operator's results = FLOPs to compute them again / bytes that they occupy

    table = kept_by_operator(lambda: block(h, rotary))
    table                                   # cheapest bytes first: products, norms; then matrices
    table.of("mm").kept_bytes

Tensors are followed by their memory, below autograd: what is still there when `call` is over, and
is neither its result nor an input or weight, is kept for the backward pass. Bytes and FLOPs are
exact and repeat; times are one run on this device, with the clock's own share in small operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from labsupport.devices import synchronize
from labsupport.results.aligned import aligned_html, aligned_text

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """All calls of one operator within the measured call."""

    operator: str
    """Its name in torch.ops.aten; "attention" for any of the fused kernels."""
    calls: int
    kept_bytes: int
    """Of its results that wait for the backward pass."""
    flops: int
    """Matrices and attention (the whole square) by their formulas; else one a number made."""
    time_s: float

    @property
    def flops_per_kept_byte(self) -> float | None:
        """What a byte costs when it is forgotten; None where nothing is kept."""
        return self.flops / self.kept_bytes if self.kept_bytes else None


@dataclass(frozen=True, repr=False)
class OperatorTable:
    """A row an operator that computes (views do not). Shows itself as a table, without times."""

    rows: tuple[OperatorRow, ...]
    """Cheapest bytes first; at the end what keeps nothing."""

    def of(self, operator: str) -> OperatorRow:
        """The row of that name. Raises ValueError that lists the names."""
        for row in self.rows:
            if row.operator == operator:
                return row
        raise ValueError(f"{operator=} did not run; {', '.join(r.operator for r in self.rows)} did")

    @property
    def kept_bytes(self) -> int:
        """Of all operators."""
        return sum(row.kept_bytes for row in self.rows)

    def lines(self) -> list[tuple[str, ...]]:
        """Header and rows as text."""
        found: list[tuple[str, ...]] = [
            ("operator", "calls", "KiB kept", "MFLOP", "FLOP a byte kept")
        ]
        for row in self.rows:
            price = row.flops_per_kept_byte
            shown = "-" if price is None else f"{price:.2f}" if price < 10 else f"{price:,.0f}"
            kept, mflop = f"{row.kept_bytes / 2**10:,.0f}", f"{row.flops / 1e6:,.2f}"
            found.append((row.operator, str(row.calls), kept, mflop, shown))
        return found

    def __repr__(self) -> str:
        return aligned_text(self.lines())

    def _repr_html_(self) -> str:
        return aligned_html(self.lines())


def kept_by_operator(call: Callable[[], object]) -> OperatorTable:
    """Run `call`, a forward pass, once; `call` should have run before (first runs are slow)."""
    with _Watch() as watch:
        result = call()
    outside = {tensor.untyped_storage()._cdata for tensor in _tensors(result)}
    rows = [
        OperatorRow(
            operator=name,
            calls=len(calls),
            kept_bytes=sum(
                size
                for key, (ref, size, maker) in watch.made.items()
                if maker == name and key not in outside and not ref.expired()
            ),
            flops=sum(flops for flops, _ in calls),
            time_s=sum(time_s for _, time_s in calls),
        )
        for name, calls in watch.calls.items()
    ]
    prices = {row.operator: row.flops_per_kept_byte for row in rows}
    rows.sort(key=lambda row: (prices[row.operator] is None, prices[row.operator], row.operator))
    return OperatorTable(tuple(rows))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that makes new memory, and that memory, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.calls: dict[str, list[tuple[int, float]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note(_tensors((args, kwargs)), maker="")  # from outside, unless noted before
        start = time.perf_counter()
        result = func(*args, **kwargs)
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in self.made]
        if fresh:
            synchronize(fresh[0].device)
            time_s = time.perf_counter() - start
            packet = func.overloadpacket
            name = "attention" if "scaled_dot_product" in str(packet) else packet.__name__
            self._note(fresh, maker=name)
            flops = _flops(func.overloadpacket, args, kwargs, result, fresh)
            self.calls.setdefault(name, []).append((flops, time_s))
        return result

    def _note(self, tensors: Iterable[Tensor], *, maker: str) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # The weak reference keeps the key from being used again.
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.made.setdefault(storage._cdata, (reference, storage.nbytes(), maker))


def _flops(packet: Any, args: Any, kwargs: Any, result: Any, fresh: list[Tensor]) -> int:
    if "scaled_dot_product" in str(packet):
        packet, args, kwargs = _ATTENTION, args[:3], {}
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return fresh[0].numel()


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
