"""The lab's command line.

    python -m labsupport doctor [--json]
    python -m labsupport bench collectives --nproc 2 --op all_gather [--json]
    python -m labsupport bench collectives --max-size 1M        # sizes as in nccl-tests: K, M, G

Exit codes: 0 done; 2 the request is wrong, told in one line; 1 it failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from labsupport.measure.collectives import Collective

SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    request = build_parser().parse_args(argv)
    try:
        return int(request.command(request))
    except ValueError as error:
        print(f"labsupport: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("labsupport: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"labsupport: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = OneLineParser(
        prog="labsupport",
        description="Check this machine, and measure it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    doctor = commands.add_parser("doctor", help="can this machine run the lab, and how well?")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(command=run_doctor)


def _add_bench(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    bench = commands.add_parser("bench", help="measure this machine")
    what = bench.add_subparsers(required=True, metavar="WHAT", dest="what")
    collectives = what.add_parser(
        "collectives",
        help="time of collectives between ranks here, by nccl-tests' conventions",
    )
    add = collectives.add_argument
    add("--nproc", type=whole_number, default=2, metavar="N", help="ranks (default: 2)")
    add(
        "--op",
        action="append",
        metavar="NAME",
        help="a collective, or all; repeat for several (default: all_reduce)",
    )
    add("--min-size", type=size, default=2**10, metavar="BYTES", help="default: 1K")
    add("--max-size", type=size, default=2**26, metavar="BYTES", help="default: 64M")
    add("--step-factor", type=whole_number, default=2, metavar="F", help="default: 2")
    add("--budget", type=seconds, default=0.2, metavar="S", help="seconds a size (default: 0.2)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    add("--json", action="store_true", help="for programs")
    collectives.set_defaults(command=run_bench_collectives)


def run_doctor(request: argparse.Namespace) -> int:
    """Print the report; 1 when the lab cannot run here."""
    from labsupport.doctor import run_checks

    report = run_checks()
    print(json.dumps(report.as_dict(), indent=1) if request.json else report)
    return 0 if report.can_run else 1


def run_bench_collectives(request: argparse.Namespace) -> int:
    """Start ranks, time the collectives, print the table."""
    from labsupport.devices import choose_device
    from labsupport.measure.bench import bench_collectives, sizes

    choose_device(request.nproc, request.device)  # refuses before torch and ranks are started
    sizes(min_bytes=request.min_size, max_bytes=request.max_size, step_factor=request.step_factor)
    chosen = _collectives(request.op or ["all_reduce"])
    from labsupport.ranks import Ranks

    with Ranks(request.nproc, device=request.device) as ranks:
        table = bench_collectives(
            ranks,
            collectives=chosen,
            min_bytes=request.min_size,
            max_bytes=request.max_size,
            step_factor=request.step_factor,
            budget_s=request.budget,
        )
    print(table.to_json() if request.json else table)
    return 0


def _collectives(names: Sequence[str]) -> tuple[Collective, ...]:
    """The collectives of those names. Raises ValueError that lists the known ones."""
    from labsupport.measure.collectives import COLLECTIVES

    if "all" in names:
        return tuple(COLLECTIVES.values())
    for name in names:
        if name not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"--op {name!r} is no known collective; all, {known} work")
    return tuple(COLLECTIVES[name] for name in names)


def whole_number(text: str) -> int:
    """An option's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1; 2 works")
    return int(text)


def seconds(text: str) -> float:
    """An option's value in seconds, above 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0; 0.2 works")
    return value


def size(text: str) -> int:
    """Bytes, with K, M or G for powers of 1024."""
    number, unit = text[:-1], text[-1:].upper()
    if unit not in SIZE_UNITS:
        number, unit = text, ""
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of bytes, or of K, M or G of them; 64M works"
        )
    return int(number) * SIZE_UNITS.get(unit, 1)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
