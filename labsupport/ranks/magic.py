"""`%%ranks`: run a cell on every rank, or on some.

%load_ext labsupport
%%ranks -r 0,2 --deadline 30
print(rank, world_size, device)
"""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labsupport.ranks import launch
from labsupport.ranks.pool import Ranks, latest_pool

DEFAULT_WORLD_SIZE = 2
_own_pool: Ranks | None = None


def load(shell: Any) -> None:
    """Register the magic and start, in the background, what ranks are forked from."""
    launch.prestart()
    shell.register_magic_function(ranks, "cell", "ranks")


@magic_arguments()  # type: ignore[untyped-decorator]
@argument(  # type: ignore[untyped-decorator]
    "-r", "--ranks", default=None, help="which ranks, as in 0,2 or 0-3 (default: all)"
)
@argument(  # type: ignore[untyped-decorator]
    "--deadline", type=float, default=None, help="stop the cell after so many seconds"
)
def ranks(line: str, cell: str) -> None:
    """Run this cell on the ranks of the pool made last; the first use makes one of two ranks."""
    arguments = parse_argstring(ranks, line)
    pool = latest_pool() or _make_pool()
    try:
        chosen = None if arguments.ranks is None else _numbers(arguments.ranks)
        pool.execute(cell, ranks=chosen, deadline_s=arguments.deadline)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _make_pool() -> Ranks:
    global _own_pool
    _own_pool = Ranks(DEFAULT_WORLD_SIZE)
    print(f"[started {_own_pool!r}; `Ranks(n)` makes another pool]")
    return _own_pool


def _numbers(text: str) -> list[int]:
    """`0,2-4` as numbers. Raises ValueError with what would work."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ValueError(f"-r {text} is not a list of ranks; -r 0,2 or -r 0-3 works")
        chosen += range(int(first), int(last or first) + 1)
    return chosen
