"""ZeRO-3: why should a rank keep weights that it is not using just now?

    rank r keeps      1/n of the weights, of the gradients and of the optimizer's state
    forward           for each block:  all-gather -> compute -> free
    backward          for each block:  all-gather -> compute -> free, reduce-scatter gradients

    model = zero3(Llama(config))

A block's weights are gathered twice where ZeRO-1 and 2 gather them once, so 3/2 of the bytes. A
block is an element of an outermost nn.ModuleList or nn.Sequential. The rest, and what blocks share,
belongs to the model: gathered once, whole until its backward ends, as in torch's fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from labsupport.parallel.zero.moments import Unit
from labsupport.parallel.zero.stage2 import Zero2


class Zero3(Zero2):
    """ZeRO-2 in which whole weights exist one block at a time."""

    keeps_whole = False

    def cut_into_units(self, model: nn.Module) -> list[Unit]:
        """The model, and each block with the parameters that nothing outside of it uses."""
        left, units = list(self.pieces), []
        for block in blocks_of(model):
            inside = set(block.modules())
            pieces = [p for p in left if all(module in inside for module, _ in p.places)]
            left = [piece for piece in left if piece not in pieces]
            if pieces:
                units.append(Unit(block, pieces))
        return [Unit(model, left), *units]

    def weights_were_used(self, unit: Unit) -> None:
        """Free the whole weights, but the model's own if its backward is about to begin."""
        if unit is self.units[0] and torch.is_grad_enabled() and not self.in_backward:
            return
        for piece in unit.pieces:
            piece.free()


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(
            child, nn.ModuleList
        ):
            yield child
        else:
            yield from blocks_of(child)
