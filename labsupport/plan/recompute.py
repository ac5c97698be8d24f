"""How far apart should checkpoints stand, and is fetching activations quicker than redoing them?

    L layers in segments of k:   peak = L/k · input + k · layer,  least at k = √(L · input/layer)
    one block on a GPU:          redo = FLOPs / (peak · utilisation),    fetch = bytes / bandwidth

    best_segment(num_layers=64, input_bytes=1, layer_bytes=1)      # 8: √64
    best_segment(num_layers=64, input_bytes=1, layer_bytes=21)     # 2: a block of 21 inputs

The first is Chen et al., 2016 (arXiv 1604.06174), who take a layer to keep as much as its input.
"""

from __future__ import annotations

from dataclasses import dataclass


def segmented_peak_bytes(
    *, num_layers: int, segment: int, input_bytes: float, layer_bytes: float
) -> float:
    """Kept at most: the inputs of all segments, and the layers of the one computed again."""
    if num_layers < 1 or not 1 <= segment <= num_layers:
        raise ValueError(f"{segment=} must lie in 1…{num_layers=}, for example 1")
    return -(-num_layers // segment) * input_bytes + segment * layer_bytes


def best_segment(*, num_layers: int, input_bytes: float, layer_bytes: float) -> int:
    """Layers a segment for the smallest peak; of equals the shortest."""
    return min(
        range(1, num_layers + 1),
        key=lambda segment: segmented_peak_bytes(
            num_layers=num_layers,
            segment=segment,
            input_bytes=input_bytes,
            layer_bytes=layer_bytes,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class FetchOrRedo:
    """Two ways to have a block's activations again in the backward pass. Label: predicted."""

    fetch_s: float
    """One way over the link; the way out, in the forward pass, takes as long."""
    redo_s: float
    """The block's forward pass."""

    @property
    def exposed_s(self) -> float:
        """Of one way, what a copy beside the computation of one forward pass cannot hide."""
        return max(0.0, self.fetch_s - self.redo_s)


def fetch_or_redo(
    *,
    kept_bytes: float,
    forward_flops: float,
    link_bytes_per_s: float,
    flops_per_s: float,
) -> FetchOrRedo:
    """`flops_per_s` is what the device reaches, not its peak: peak · utilisation."""
    if min(link_bytes_per_s, flops_per_s) <= 0:
        raise ValueError(
            f"{link_bytes_per_s=} and {flops_per_s=} must be positive, for example 63e9 and 500e12"
        )
    return FetchOrRedo(fetch_s=kept_bytes / link_bytes_per_s, redo_s=forward_flops / flops_per_s)
