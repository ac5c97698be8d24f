"""The widget of 04_mixed_precision: every offered value can be drawn, and a change draws again."""

from __future__ import annotations

import pytest

from labsupport.plan.number_formats import FORMATS
from labsupport.widgets import number_line


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [1e-9, 1e-5, 0.3, 500.0, 1e9])
def test_every_offered_value_can_be_drawn(name: str, value: float) -> None:
    assert f"in {name}" in number_line(name=name, value=value).figure.alt


def test_a_change_draws_again() -> None:
    picture = number_line(name="fp16", value=1.0)
    assert picture.figure.alt == "1 in fp16 becomes 1"
    picture.controls["value"].value = 1e6
    assert picture.figure.alt == "1e+06 in fp16 is beyond the largest: infinity"
    picture.controls["name"].value = "bf16"
    assert picture.figure.alt == "1e+06 in bf16 becomes 999424"


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of fp32, bf16"):
        number_line(name="fp4")
    with pytest.raises(ValueError, match="1e-09…1e"):
        number_line(value=0.0)
