"""Segments against hand-worked numbers, and fetching against redoing."""

from __future__ import annotations

import pytest

from labsupport.plan.recompute import best_segment, fetch_or_redo, segmented_peak_bytes


def test_sixteen_plain_layers_by_hand() -> None:
    sizes = {"num_layers": 16, "input_bytes": 10, "layer_bytes": 10}
    peaks = {k: segmented_peak_bytes(segment=k, **sizes) for k in (1, 2, 3, 4, 8, 16)}
    # 3: six segments, the last of them short.
    assert peaks == {1: 170, 2: 100, 3: 90, 4: 80, 8: 100, 16: 170}
    assert best_segment(**sizes) == 4


@pytest.mark.parametrize(("num_layers", "best"), [(16, 1), (42, 1), (48, 2), (64, 2), (1024, 7)])
def test_a_layer_that_keeps_more_wants_shorter_segments(num_layers: int, best: int) -> None:
    assert best_segment(num_layers=num_layers, input_bytes=1, layer_bytes=21) == best


def test_fetch_or_redo() -> None:
    times = fetch_or_redo(
        kept_bytes=63e9, forward_flops=1e15, link_bytes_per_s=63e9, flops_per_s=500e12
    )
    assert (times.fetch_s, times.redo_s, times.exposed_s) == (1.0, 2.0, 0.0)
    slow = fetch_or_redo(kept_bytes=3e9, forward_flops=1e12, link_bytes_per_s=1e9, flops_per_s=1e12)
    assert slow.exposed_s == 2.0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="segment=5 must lie in 1…num_layers=4"):
        segmented_peak_bytes(num_layers=4, segment=5, input_bytes=1, layer_bytes=1)
    with pytest.raises(ValueError, match="63e9 and 500e12"):
        fetch_or_redo(kept_bytes=1, forward_flops=1, link_bytes_per_s=0, flops_per_s=1)
