"""The widget of 06_data_parallel: one bucket for everything hides nothing."""

from __future__ import annotations

import pytest

from labsupport.widgets import bucket_size


def test_moving_the_bucket_draws_again() -> None:
    picture = bucket_size()
    assert picture.figure.alt.startswith("Buckets of 32 MiB: ")
    picture.controls["bucket_bytes"].value = 2**32
    assert "1 message," in picture.figure.alt
    exposed, whole = picture.figure.alt.rsplit(", ", 1)[1].split(" exposed of ")
    assert exposed == whole


def test_the_outermost_choices_can_be_drawn() -> None:
    picture = bucket_size()
    for control in picture.controls.values():
        for option in (control.options[0], control.options[-1]):
            control.value = option[1] if isinstance(option, tuple) else option


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=1000 is not offered"):
        bucket_size(bucket_bytes=1000)
    with pytest.raises(ValueError, match=r"'string' is not offered; one of .*nvlink4"):
        bucket_size(link="string")
