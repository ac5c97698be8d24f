"""Every check of 00_start_here takes the solution, calls the stub blank, and knows a mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from labsupport import Ranks
from labsupport.checks import start_here as check


def assert_hint(verdict: Any, *words: str) -> None:
    assert verdict.status == "not yet"
    for word in words:
        assert word in verdict.hint, verdict.hint


def test_whose_print() -> None:
    assert check.whose_print([1, 3]).is_right
    assert check.whose_print({3, 1}).is_right
    assert check.whose_print(...).status == "blank"
    assert check.whose_print([...]).status == "blank"
    assert_hint(check.whose_print([0, 2]), "odd")
    assert_hint(check.whose_print([2, 4]), "counted from 0")
    assert_hint(check.whose_print([0, 1, 2, 3]), "its own rank")
    assert_hint(check.whose_print("all"))


def test_global_batch_tokens() -> None:
    assert check.global_batch_tokens(65_536).is_right
    assert check.global_batch_tokens(...).status == "blank"
    assert_hint(check.global_batch_tokens(8192), "one rank")
    assert_hint(check.global_batch_tokens(32), "sequences")
    assert_hint(check.global_batch_tokens("many"), "number")


def test_another_world_size_takes_the_solution() -> None:
    def add_up() -> float:
        number = torch.tensor([10.0 * (rank + 1)], device=device)  # type: ignore[name-defined]  # noqa: F821
        dist.all_reduce(number)
        return number.item()

    add_up.__module__ = "__main__"  # as in a notebook: `rank` and `device` are found on the rank

    def solution(world_size: int) -> list[float]:
        with Ranks(world_size) as pool:
            return pool.run(add_up)

    assert check.another_world_size(solution).is_right


def test_another_world_size_tells_mistakes() -> None:
    def stub(world_size: int) -> Any: ...

    def broken(world_size: int) -> Any:
        raise KeyError("pool")

    assert check.another_world_size(stub).status == "blank"
    assert_hint(check.another_world_size(lambda n: [10.0, 20.0, 30.0]), "all_reduce")
    assert_hint(check.another_world_size(lambda n: [30.0, 30.0]), "two ranks")
    assert_hint(check.another_world_size(lambda n: 60.0), "whole list")
    assert_hint(check.another_world_size(lambda n: torch.tensor([60.0])), "whole list")
    assert_hint(check.another_world_size(broken), "KeyError")
    assert_hint(check.another_world_size(60), "function")


def solution_of_mean(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sum_instead(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def own_back(x: torch.Tensor) -> torch.Tensor:
    return x


def only_rank_0(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    return x


def by_value(function: Any) -> Any:
    """The function as if a notebook had defined it: it travels, its module does not."""
    function.__module__ = "__main__"
    return function


def test_mean_over_ranks_takes_the_solution() -> None:
    assert check.mean_over_ranks(by_value(solution_of_mean)).is_right


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(sum_instead, "sum"), (own_back, "no all_reduce"), (only_rank_0, "on three ranks")],
)
def test_mean_over_ranks_tells_mistakes(wrong: Any, words: str) -> None:
    assert_hint(check.mean_over_ranks(by_value(wrong)), words)


def test_mean_over_ranks_calls_the_stub_blank() -> None:
    def stub(x: torch.Tensor) -> Any: ...

    def unfinished(x: torch.Tensor) -> Any:
        x = x * 2
        return None

    assert check.mean_over_ranks(stub).status == "blank"
    assert check.mean_over_ranks(by_value(unfinished)).status == "blank"
    assert_hint(check.mean_over_ranks(3), "function")


def results(shift: float, *seeds: int) -> list[dict[str, Any]]:
    losses = [7.0 + shift, 6.0 + shift]
    return [{"losses": losses, "weights": {"w": torch.full((2,), float(s))}} for s in seeds]


def test_curves_part() -> None:
    reference = [7.0, 6.0]
    assert check.curves_part(results(0.5, 0, 1), reference).is_right
    assert check.curves_part(..., reference).status == "blank"
    assert_hint(check.curves_part(results(0.5, 1, 1), reference), "equal weights", "`rank`")
    assert_hint(check.curves_part(results(0.0, 0, 0), reference), "nothing has changed")
    assert_hint(check.curves_part(results(0.0, 0, 1), reference), "hardly part")
    assert_hint(check.curves_part([7.0, 6.0], reference), "ranks.run")
    assert_hint(check.curves_part("apart", reference), "ranks.run")
