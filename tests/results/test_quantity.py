"""Every number says what it is, and a prediction meets a measurement in one place only."""

import numpy as np
import pytest
import torch

from labsupport import results
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


def test_a_comparison_as_text():
    assert repr(compare(0.010, TOOK, MODEL)) == (
        "all-reduce\n"
        "                 value  measured / it  source\n"
        "your prediction  10 ms           2.10  you\n"
        "predicted        18 ms           1.17  latency + bytes / bandwidth\n"
        "measured         21 ms                 2 gloo ranks"
    )


def test_ratios():
    both = compare(0.010, TOOK, MODEL)
    assert both.ratio == pytest.approx(2.1)
    assert both.model_ratio == pytest.approx(0.021 / 0.018)
    assert compare(0.010, TOOK).model_ratio is None


@pytest.mark.parametrize("nothing", [..., None])
def test_a_blank_prediction_gets_a_nudge_and_no_error(nothing):
    comparison = compare(nothing, TOOK, MODEL)
    assert comparison.ratio is None
    assert comparison.model_ratio is not None
    assert repr(comparison).endswith(results.NUDGE)
    assert results.NUDGE in comparison._repr_html_()
    assert results.NUDGE not in repr(compare(1, TOOK))


def test_html_holds_the_same_cells_and_is_escaped():
    comparison = compare(1, measured("a < b", 2, on="<here>"), predicted("a < b", 4, by="x & y"))
    page = comparison._repr_html_()
    assert "<caption style='text-align:left'>a &lt; b</caption>" in page
    for text in (
        "your prediction",
        "predicted",
        "measured",
        "2.00",
        "0.50",
        "&lt;here&gt;",
        "x &amp; y",
    ):
        assert text in page
    assert "<here>" not in page


def test_outputs_repeat():
    first, second = (compare(3, measured("sum", 3), predicted("sum", 3, by="n")) for _ in range(2))
    assert repr(first) == repr(second)
    assert first._repr_html_() == second._repr_html_()


def test_words_and_yes_no_are_compared_without_a_ratio():
    coincide = compare(True, measured("curves coincide", True))
    assert "your prediction    yes          yes" in repr(coincide)
    assert coincide.ratio is None
    assert "  no  you" in repr(compare("ring", measured("algorithm", "tree")))


def test_zero_and_nan_do_not_fail():
    assert compare(0, measured("sum", 3)).ratio is None
    assert "-" in repr(compare(0, measured("sum", 3)))
    assert "nan" in repr(compare(1.0, measured("loss", float("nan"))))


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
        (lambda: compare(1, MODEL), "is predicted; a comparison needs something measured"),
        (lambda: compare(1, TOOK, TOOK), "is measured; it must be predicted or published"),
        (
            lambda: compare(1, TOOK, predicted("all-reduce", 18, "ms", by="f")),
            "model is in 'ms' and the measurement in 's'",
        ),
        (
            lambda: compare("fast", TOOK),
            "'fast' is a word, but 'all-reduce' is measured as a number",
        ),
        (lambda: compare(True, TOOK), "True is yes or no, but"),
        (lambda: compare(1, measured("equal", True)), "1 is a number, but"),
        (lambda: compare(TOOK, TOOK), "prediction is all-reduce: 21 ms"),
    ],
)
def test_what_cannot_be_compared_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
