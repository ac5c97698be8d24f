"""How many bytes does a step hand to the library's collectives, whoever calls them?

    with count_collective_bytes() as counted:
        train_step(model, …)
    counted.calls, counted.total_bytes          # 3, 5_247_488
    counted.gradient_bytes                      # of all-reduce and reduce-scatter

Every collective is an operator of torch (`c10d::allreduce_`, …), also where torch's DDP or FSDP
calls it from C++; here each is noted on its way. A call counts with its whole tensor, as in
nccl-tests: what a rank then really sends is that times 2(n-1)/n, or (n-1)/n.
`measure.sent` counts point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            size_bytes = max((t.numel() * t.element_size() for t in tensors), default=0)
            self._sizes_bytes.setdefault(name, []).append(size_bytes)
        return func(*args, **(kwargs or {}))
