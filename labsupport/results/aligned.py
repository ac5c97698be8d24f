"""How do lines of cells look as a table? The first column stands left, numbers stand right.

lines = [("recipe", "held"), ("ZeRO-1", "10 MiB"), ("ZeRO-3", "5 MiB")]     # the header first
print(aligned_text(lines))              # what a __repr__ returns
aligned_html(lines)                     # what a _repr_html_ returns
"""

from __future__ import annotations

import html
from collections.abc import Sequence

Lines = Sequence[Sequence[str]]


def aligned_text(lines: Lines) -> str:
    """Columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def aligned_html(lines: Lines) -> str:
    """A <table> with a head."""
    head, *rows = [[html.escape(cell) for cell in line] for line in lines]
    left, right = "<td style='text-align:left'>", "<td style='text-align:right'>"
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr>{left}{row[0]}</td>" + "".join(f"{right}{cell}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
