"""How many bytes does a step hand to the library's collectives, whoever calls them?

    with count_collective_bytes() as counted:
        train_step(model, …)
    counted.calls, counted.total_bytes          # 3, 5_247_488
    counted.gradient_bytes                      # of all-reduce and reduce-scatter

Every collective is an operator of torch (`c10d::allreduce_`, …), also where torch's DDP or FSDP
calls it from C++; here each is noted on its way. DTensor has operators of its own for the same
(`_c10d_functional::all_reduce`, …), which give back a new tensor. A call counts with its whole
tensor, as in nccl-tests: what a rank then really sends is that times 2(n-1)/n, or (n-1)/n.
`measure.sent` counts point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "alltoall",
    "broadcast": "broadcast",
}
"""DTensor's operators, and c10d's names for them."""


@dataclass
class CollectiveBytes:
    """A running count of this rank's calls; it stands still once the `with` block is left."""

    sizes_bytes: dict[str, list[int]] = field(default_factory=dict)
    """Operator, as in "allreduce", -> size of each call in order."""

    @property
    def calls(self) -> int:
        """Collectives of any kind."""
        return sum(map(len, self.sizes_bytes.values()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(map(sum, self.sizes_bytes.values()))

    @property
    def gradient_bytes(self) -> int:
        """Bytes that were added up over ranks: all-reduce and reduce-scatter."""
        reducing = ("allreduce", "reduce_scatter")
        return sum(sum(s) for name, s in self.sizes_bytes.items() if name.startswith(reducing))


@contextmanager
def count_collective_bytes() -> Iterator[CollectiveBytes]:
    """Count inside the block. Python then sees every operator: do not take times in there."""
    counted = CollectiveBytes()
    with _Watch(counted.sizes_bytes):
        yield counted


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sizes_bytes: dict[str, list[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes_bytes = sizes_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it then does with its shards comes by again
        out = func(*args, **(kwargs or {}))
        name = _name_of(func)
        if name is not None:
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            size_bytes = max((t.numel() * t.element_size() for t in tensors), default=0)
            self._sizes_bytes.setdefault(name, []).append(size_bytes)
        return out


def _name_of(func: Any) -> str | None:
    """As c10d calls it, without its variants; None for what is no collective."""
    name: str = func.overloadpacket.__name__.strip("_")
    if func.namespace == "c10d":
        return name.removesuffix("_base")
    return _FUNCTIONAL.get(name) if func.namespace == "_c10d_functional" else None
