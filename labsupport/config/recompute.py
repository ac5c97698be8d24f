"""Which activations are forgotten after the forward pass, to be computed again in the backward?

Recompute.parse("every-2")     # Recompute(mode='full', every=2)
str(Recompute())               # 'none'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

from labsupport.config.rules import at_least, one_of

RecomputeMode = Literal["none", "full", "selective", "offload"]


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What activation checkpointing does to the blocks of a model."""

    mode: RecomputeMode = "none"
    """full: a block keeps its input only; selective: also the results of its matrix
    multiplications and attention; offload: all it would keep, but in host memory."""
    every: int = 1
    """full only: every how many blocks one is checkpointed, counted from the first."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, RecomputeMode)
        at_least(1, every=self.every)
        if self.every > 1 and self.mode != "full":
            raise ValueError(f"every={self.every} is for mode='full' only; use 1")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read none, full, selective, offload, or every-K as in `every-2`.

        Raises ValueError for anything else.
        """
        prefix, _, count = text.partition("-")
        if prefix == "every" and count.isdecimal() and int(count) >= 1:
            return cls(mode="full", every=int(count))
        for mode in get_args(RecomputeMode):
            if text == mode:
                return cls(mode=mode)
        raise ValueError(
            f"activation_checkpointing={text!r} is unknown; choose one of none, full, selective, "
            f"offload, or every-K, for example 'every-2'"
        )

    def __str__(self) -> str:
        return f"every-{self.every}" if self.every > 1 else self.mode
