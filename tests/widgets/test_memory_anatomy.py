"""The anatomy widget draws what its menus predict, and a measurement only where it belongs."""

from __future__ import annotations

import pytest

from labsupport.config import ModelConfig
from labsupport.plan import training_memory
from labsupport.plots.style import size_label
from labsupport.widgets import memory_anatomy


def test_the_menus_are_the_prediction() -> None:
    widget = memory_anatomy(model="1b", seq_len=8192, precision="bf16")
    plan = training_memory(
        ModelConfig.named("1b"), micro_batch_size=1, seq_len=8192, precision="bf16"
    )
    assert f"predicted, later: {size_label(plan.peak_bytes)}" in widget.figure.alt
    assert f"predicted, first step: {size_label(plan.first_peak_bytes)}" in widget.figure.alt
    widget.controls["optimizer"].value = "plain sgd"
    widget.controls["recompute"].value = "full"
    widget.controls["seq_len"].value = 32
    small = 8 * ModelConfig.named("1b").num_params  # weights and gradients
    later = widget.figure.alt.split("later: ")[1]
    assert small / 2**30 < float(later.split()[0]) < 1.25 * small / 2**30


def test_a_measurement_stands_beside_its_own_settings_only() -> None:
    config = ModelConfig.named("tiny")
    widget = memory_anatomy(
        models={"mine": config},
        model="mine",
        micro_batch_size=4,
        seq_len=128,
        precision="fp32",
        measured={"parameters": 2**22, "activations": 2**24},
    )
    assert "measured, later: 20 MiB, most of it activations" in widget.figure.alt
    widget.controls["micro_batch_size"].value = 8
    assert "measured" not in widget.figure.alt
    widget.controls["micro_batch_size"].value = 4
    assert "measured" in widget.figure.alt


def test_every_choice_can_be_drawn() -> None:
    widget = memory_anatomy()
    for name, control in widget.controls.items():
        for option in control.options:
            control.value = option[1] if name == "optimizer" else option
            assert widget.figure.alt


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "gpt"}, "llama-3.1-8b"),
        ({"seq_len": 100}, "64, 128"),
        ({"optimizer": "lion"}, "sgd"),
    ],
)
def test_bad_choices(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_anatomy(**wrong)  # type: ignore[arg-type]
