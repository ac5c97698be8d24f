"""ZeRO-2: why should a rank keep gradients of rows that it does not update?

    rank r keeps      all weights, 1/n of the gradients, 1/n of the optimizer's state
    in the backward   a gradient is there -> reduce-scatter -> the whole one is freed

    model = zero2(Llama(config))

The messages are those of ZeRO-1; they only leave earlier. Under `no_sync()` whole gradients add up
on each rank and memory is that of ZeRO-1; without it every backward sends, and adds up shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labsupport.parallel.zero.stage1 import Zero1


class Zero2(Zero1):
    """ZeRO-1 in which gradients leave during the backward."""

    def gradient_has_arrived(self) -> None:
        """Exchange what is ready, in the order that all ranks keep to."""
        while self.waiting and self.waiting[0].is_ready:
            self.exchange(self.waiting.popleft())

    def room_for(self, rows: Tensor) -> Tensor:
        """Memory of its own, so that the whole gradient can go."""
        return torch.empty_like(rows)
