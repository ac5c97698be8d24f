"""The widget of 07_sharded_data_parallel: more ranks shrink the states of zero3, never of ddp."""

from __future__ import annotations

import pytest

from labsupport.widgets import sharding_ladder


def test_the_title_says_what_is_held_and_from_where_on_it_fits() -> None:
    picture = sharding_ladder()
    title = picture.figure.axes[0].get_title(loc="left")
    assert title == "zero3, 64 ranks: 1.87 GiB each; in 80 GiB the states fit from 2 ranks on"
    picture.controls["stage"].value = "ddp"
    title = picture.figure.axes[0].get_title(loc="left")
    assert "120 GiB each" in title
    assert "do not fit on 1,024 ranks" in title
    picture.controls["optimizer"].value = "sgd"
    assert "89.7 GiB each" in picture.figure.axes[0].get_title(loc="left")


def test_measured_points_stand_only_with_their_own_settings() -> None:
    counted = {"tiny": {"zero1": {2: {"parameters": 5 * 2**20, "gradients": 5 * 2**20}}}}
    picture = sharding_ladder(model="tiny", world_size=4, precision="fp32", measured=counted)

    def lines() -> int:
        return sum(len(line.get_xdata()) == 2 for line in picture.figure.axes[0].lines)

    with_points = lines()
    picture.controls["precision"].value = "bf16"
    assert lines() < with_points
    picture.controls["precision"].value = "fp32"
    picture.controls["model"].value = "125m"
    assert lines() < with_points
    picture.controls["model"].value = "tiny"
    assert lines() == with_points


def test_the_outermost_choices_can_be_drawn() -> None:
    picture = sharding_ladder()
    for control in picture.controls.values():
        for option in (control.options[0], control.options[-1]):
            control.value = option


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=3 is not offered"):
        sharding_ladder(world_size=3)
