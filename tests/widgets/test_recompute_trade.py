"""The widget of 05_activation_checkpointing: less is kept, more is computed, more fits."""

from __future__ import annotations

import pytest

from labsupport.widgets import recompute_trade


def test_modes_stand_side_by_side() -> None:
    picture = recompute_trade()
    none, *_, full, offload = picture.figure.alt.split("; ")
    assert none.startswith("none, +0% FLOPs: ")
    assert none.endswith("most of it activations")
    assert full.startswith("full, +2")  # percent: the head, which is large, is not run again
    assert offload.startswith("offload, +0% FLOPs: ")
    before = picture.figure.alt
    picture.controls["seq_len"].value = 128
    assert picture.figure.alt != before


def test_every_choice_can_be_drawn() -> None:
    picture = recompute_trade()
    for control in picture.controls.values():
        for option in control.options:
            control.value = option


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_gb=7 is not offered; one of \(16, 24"):
        recompute_trade(memory_gb=7)
