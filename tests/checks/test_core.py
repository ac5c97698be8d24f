"""Checks say blank, right or not yet, and never raise, whatever a learner hands in."""

import math

import numpy as np
import pytest
import torch

from labsupport import checks


def dots(x): ...


def documented(x, y=2):
    """Adds."""


def passes():
    pass


def returns_dots(x):
    return ...


def returns_none():
    return None


def closure():
    x = 1

    def inner():
        _ = x

    def stub(): ...

    return inner, stub


class Broken:
    def __repr__(self):
        raise RuntimeError("broken")

    def item(self):
        raise RuntimeError("broken")

    def __eq__(self, other):
        raise RuntimeError("broken")

    __hash__ = None


STUBS = [
    ...,
    None,
    dots,
    documented,
    passes,
    returns_dots,
    returns_none,
    lambda x: ...,
    closure()[1],
]
ODD = [
    float("nan"), math.inf, "4", "", [], {}, [1, "a"], np.ones(3), torch.ones(2, 2), object(),
    Broken(), lambda: 1 / 0, int, True, 4j, b"4", range(3), [[1]], 10**400,
]  # fmt: skip


@pytest.mark.parametrize("stub", [*STUBS, (..., 1), [...], {"a": ...}])
def test_blank_is_seen(stub):
    assert checks.is_blank(stub)


@pytest.mark.parametrize("answer", [0, False, "", [], {}, [None], len, lambda x: x, closure()[0]])
def test_an_answer_is_not_blank(answer):
    assert not checks.is_blank(answer)


def test_a_stub_is_read_not_called():
    called = []

    def works():
        called.append(1)

    assert not checks.is_blank(works)
    assert not called


@pytest.mark.parametrize("stub", STUBS)
def test_every_check_answers_blank_to_a_stub(stub):
    assert checks.number(stub, 4).status == "blank"
    assert checks.numbers(stub, [4]).status == "blank"
    assert checks.choice(stub, "ring").status == "blank"
    assert checks.function(stub, [((1,), 1)]).status == "blank"


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_no_check_raises_whatever_comes(odd):
    assert checks.number(odd, 4).status == "not yet"
    assert checks.numbers(odd, [4, 5]).status == "not yet"
    assert checks.choice(odd, "ring").status == "not yet"
    assert checks.function(odd, [((), 5)]).status == "not yet"
    assert checks.function(lambda: odd, [((), 5)]).status == "not yet"
    assert checks.function(lambda: odd, [((), "ring")]).status == "not yet"
    assert repr(checks.number(odd, 4))


@pytest.mark.parametrize("four", [4, 4.0, 4.03, np.float32(4), np.int64(4), torch.tensor(4.0)])
def test_right_numbers(four):
    assert checks.number(four, 4, why="two ranks").hint == "two ranks"
    assert checks.number(four, 4).is_right


def test_tolerance():
    assert checks.number(4.01, 4, rel=1e-6).status == "not yet"
    assert checks.number(0.005, 0).is_right
    assert checks.number(0.5, 0).status == "not yet"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (3.5, "that is the mean"),
        (32, "bits or bytes"),
        (0.5, "bits or bytes"),
        (4000, "which unit"),
        (4 * 2**30 / 1e9, "GiB"),
        (-3, "sign"),
        (9, "too large"),
        (1, "too small"),
        ("4", "a number is wanted, this is str '4'"),
        (float("nan"), "finite"),
    ],
)
def test_a_wrong_number_gets_the_hint_of_its_mistake(answer, hint):
    verdict = checks.number(answer, 4, hints={3.5: "that is the mean"})
    assert verdict.status == "not yet"
    assert hint in verdict.hint


def test_hints_do_not_give_the_solution_away():
    assert "1234" not in checks.number(7, 1234).hint
    assert "1234" not in checks.function(lambda: 7, [((), 1234)]).hint
    assert "tree" not in checks.choice("ring", "tree").hint


def test_choice():
    assert checks.choice(" Ring ", "ring").is_right
    assert (
        checks.choice("STAR", "ring", hints={"star": "the centre drowns"}).hint
        == "the centre drowns"
    )
    assert "in quotes" in checks.choice(3, "ring").hint


@pytest.mark.parametrize("answer", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1.0, 2.0])])
def test_lists_of_numbers(answer):
    assert checks.numbers(answer, [1, 2]).is_right
    assert checks.numbers(answer, [1, 2, 3]).hint == "3 numbers are wanted, these are 2"
    assert checks.numbers(answer, [1, 3]).hint.startswith("entry 1 (counted from 0)")


def test_functions_are_tried_on_cases():
    cases = [((1, 2), 3), ((2, 2), 4)]
    assert checks.function(lambda a, b: a + b, cases).is_right
    wrong = checks.function(lambda a, b: 3, cases, hint="use both arguments")
    assert wrong.hint == "with 2, 2 it gives 3. use both arguments."
    raises = checks.function(lambda a, b: a + c, cases)  # noqa: F821
    assert "with 1, 2 it raises NameError" in raises.hint
    assert checks.function(lambda a, b: None, cases).status == "blank"
    assert checks.function(lambda n: [n, n + 1], [((1,), [1, 2])]).is_right
    assert checks.function(lambda: "ring", [((), "ring")]).is_right
    assert checks.function(lambda: torch.ones(2), [((), torch.ones(2))]).is_right
    assert checks.function(lambda: torch.eye(2), [((), [[1, 0], [0, 1]])]).is_right
    assert checks.function(lambda: torch.ones(2), [((), [[1, 0], [0, 1]])]).status == "not yet"


def test_a_function_that_is_still_blank_inside():
    def half(x):
        y = x + 1
        return ... if y else None

    def announced(x):
        raise NotImplementedError

    assert checks.function(half, [((1,), 2)]).status == "blank"
    assert checks.function(announced, [((1,), 2)]).status == "blank"


def test_own_rule_of_equality():
    verdict = checks.function(
        lambda: {2, 1}, [((), [1, 2])], same=lambda got, want: sorted(got) == want
    )
    assert verdict.is_right


def test_how_a_verdict_looks():
    verdict = checks.not_yet("a < b")
    assert repr(verdict) == "not yet: a < b"
    assert "a &lt; b" in verdict._repr_html_()
    assert repr(checks.right()) == "right"
    assert checks.blank()._repr_html_().isascii()
