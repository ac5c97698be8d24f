"""A prediction meets a measurement in one place only, and blank ones do no harm."""

import pytest

from labsupport import results
from labsupport.results import compare, measured, predicted

TOOK = measured("all-reduce", 0.021, "s", on="2 gloo ranks")
MODEL = predicted("all-reduce", 0.018, "s", by="latency + bytes / bandwidth")


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
