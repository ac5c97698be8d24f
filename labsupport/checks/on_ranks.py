"""What does an answer that is a function do when every rank calls it?

    try_on_ranks(_swap_with_partner, answer, ranks, deadline_s=20)    # results, or a Verdict

For exercises whose answer talks to other ranks: what it raises there becomes a hint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labsupport.checks import blank, is_blank, not_yet
from labsupport.ranks import RankError, Ranks


def try_on_ranks(check: Callable[..., Any], answer: Any, ranks: Ranks, *, deadline_s: float) -> Any:
    """Results of `check(answer)` on every rank, or the verdict on a stub and on what it raised."""
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted")
    try:
        return ranks.run(check, answer, deadline_s=deadline_s)
    except (RankError, TypeError) as error:  # TypeError: it cannot be sent to the ranks
        return not_yet(str(error))
