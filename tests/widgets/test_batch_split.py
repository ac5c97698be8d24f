"""The widget of 00_start_here: its sliders offer only what can be drawn, and redraw it."""

from __future__ import annotations

import pytest

from labsupport.widgets import batch_split
from labsupport.widgets.batch_split import BATCHES, RANKS


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("sequences", BATCHES)
def test_every_offered_pair_can_be_drawn(world_size: int, sequences: int) -> None:
    picture = batch_split(world_size=world_size, global_batch_size=sequences)
    assert f"{sequences // world_size} each" in picture.figure.alt


def test_moving_a_slider_draws_again() -> None:
    picture = batch_split(world_size=2, global_batch_size=16)
    picture.controls["world_size"].value = 8
    assert picture.figure.alt.startswith("16 sequences over 8 ranks: 2 each")


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=3 is not offered"):
        batch_split(world_size=3)
    with pytest.raises(ValueError, match="global_batch_size=12 is not offered"):
        batch_split(global_batch_size=12)
