"""Every number says what it is."""

import numpy as np
import pytest
import torch

from labsupport.results import (
    LABELS,
    Quantity,
    compare,
    emulated,
    format_value,
    measured,
    predicted,
    published,
    recorded,
)

TOOK = measured("all-reduce", 0.021, "s", on="2 gloo ranks")
MODEL = predicted("all-reduce", 0.018, "s", by="latency + bytes / bandwidth")


def test_five_labels_and_a_constructor_for_each():
    made = [
        TOOK,
        MODEL,
        published("all-reduce", 1, "s", source="nccl-tests"),
        emulated("all-reduce", 1, "s", stand_in="sleep for compute"),
        recorded("all-reduce", 1, "s", on="one H200", date="2026-01-31"),
    ]
    assert tuple(quantity.label for quantity in made) == LABELS
    assert made[4].source == "one H200, 2026-01-31"
    assert measured("x", 1).source == "this machine"


@pytest.mark.parametrize("scalar", [np.float32(2.5), np.array(2.5), torch.tensor(2.5)])
def test_scalars_of_numpy_and_torch_become_numbers(scalar):
    assert type(measured("x", scalar).value) is float
    assert compare(scalar, measured("x", 5.0)).ratio == 2.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 bytes"),
        (1023, "bytes", "1,023 bytes"),
        (16 * 2**20, "bytes", "16 MiB"),
        (1.5 * 2**30, "bytes", "1.5 GiB"),
        (-(2**20), "bytes", "-1 MiB"),
        (1e9, "bytes", "953.7 MiB"),
        (450, "GB/s", "450 GB/s"),
        (90.0, "s", "90 s"),
        (0.00002, "s", "20 µs"),
        (123_456_789, "", "123,456,789"),
        (1 / 3, "", "0.3333"),
        (1e-7, "", "1e-07"),
        (float("inf"), "s", "inf s"),
        (True, "", "yes"),
        ("ring", "", "ring"),
    ],
)
def test_units_for_a_person(value, unit, text):
    assert format_value(value, unit) == text


def test_a_quantity_shows_label_and_source():
    assert repr(TOOK) == "all-reduce: 21 ms (measured: 2 gloo ranks)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Quantity("x", 1, "", "guessed", "me"),
            "'guessed' is unknown; choose one of measured",
        ),
        (lambda: predicted("x", 1, by=" "), "must both say something, for example"),
        (lambda: measured("", 1), "must both say something"),
        (lambda: measured("x", [1, 2]), r"value of 'x' is \[1, 2\]; it must be one number"),
        (lambda: measured("x", torch.ones(2)), "it must be one number"),
        (lambda: measured("x", "fast", "s"), "unit='s' needs a number, not 'fast'"),
        (lambda: measured("x", True, "s"), "unit='s' needs a number, not True"),
    ],
)
def test_what_is_no_quantity_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
