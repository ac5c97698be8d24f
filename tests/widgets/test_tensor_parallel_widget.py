"""The widget of 08_tensor_parallel: a slow link makes splitting worse than one rank alone."""

from __future__ import annotations

import pytest

from labsupport.plan.links import Road
from labsupport.widgets import MeasuredLink, tensor_parallel_link

HERE = MeasuredLink(
    link=Road(name="wire", latency_s=3e-4, bandwidth_bytes_per_s=7e8, basis="fitted here"),
    flops_per_s=4e10,
    micro_batch_size=8,
    seq_len=128,
    utilisation={(2, 128): 0.6, (2, 256): 0.8},
)


def test_a_slower_link_turns_the_verdict() -> None:
    picture = tensor_parallel_link(link="nvlink4", hidden_size=4096, tensor_parallel_size=8)
    assert picture.figure.alt.startswith("8 ranks, hidden 4,096, NVLink 4")
    assert "5.6 times as fast as one rank alone, 70% busy" in picture.figure.alt
    picture.controls["link"].value = "ethernet-100"
    assert "slower than one rank alone" in picture.figure.alt


def test_width_pays() -> None:
    picture = tensor_parallel_link(link="pcie4-x16", hidden_size=2048, tensor_parallel_size=2)
    narrow = _busy(picture.figure.alt)
    picture.controls["hidden_size"].value = 16384
    assert _busy(picture.figure.alt) > narrow


def test_measured_points_belong_to_their_link() -> None:
    picture = tensor_parallel_link(link="here", hidden_size=256, measured={"here": HERE})
    assert "(dots: measured here)" in picture.figure.axes[1].get_xlabel()
    picture.controls["link"].value = "nvlink4"
    assert "measured" not in picture.figure.axes[1].get_xlabel()


def test_every_choice_can_be_drawn() -> None:
    picture = tensor_parallel_link(measured={"here": HERE})
    for control in picture.controls.values():
        for option in (control.options[0], control.options[-1]):
            control.value = option[1] if isinstance(option, tuple) else option


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'string' is not offered; one of .*nvlink4"):
        tensor_parallel_link(link="string")
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is not offered"):
        tensor_parallel_link(tensor_parallel_size=3)


def _busy(alt: str) -> int:
    return int(alt.rsplit(", ", 1)[1].removesuffix("% busy"))
