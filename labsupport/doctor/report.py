"""What one check found, and all of them as a page, as a table in a notebook, and as JSON.

Check("memory", "warn", "1.2 GiB available", "close other programs").status
print(report)                      # aligned, one line a check, the verdict last
report.as_dict()                   # {"checks": [...], "can_run": true}
"""

from __future__ import annotations

import html
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """One line of the page. `fix` is empty when there is nothing to do."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """Every check, and whether the lab can run here."""

    checks: tuple[Check, ...]
    tier: str

    @property
    def can_run(self) -> bool:
        """False when a check failed; a warning does not stop the lab."""
        return all(check.status != "fail" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"{name!r} is no check; there are {[c.name for c in self.checks]}")

    @property
    def verdict(self) -> str:
        """The one line that a learner in a hurry reads."""
        failed = [check.name for check in self.checks if check.status == "fail"]
        warned = [check.name for check in self.checks if check.status == "warn"]
        if failed:
            return f"This machine cannot run the lab yet: mend {', '.join(failed)}."
        remark = f" ({len(warned)} to look at: {', '.join(warned)})" if warned else ""
        return f"This machine can run the lab: {self.tier}{remark}."

    def as_dict(self) -> dict[str, Any]:
        """The contract of `doctor --json`."""
        return {"checks": [asdict(check) for check in self.checks], "can_run": self.can_run}

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines += _wrapped(f"{check.name:{width}}  {MARKS[check.status]:4}  ", check.detail)
            if check.fix:
                lines += _wrapped(" " * (width + 8), f"fix: {check.fix}")
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(check.name)}</td>"
            f"<td>{MARKS[check.status]}</td>"
            f"<td style='text-align:left'>{html.escape(check.detail)}"
            f"{'<br><b>fix:</b> ' + html.escape(check.fix) if check.fix else ''}</td></tr>"
            for check in self.checks
        )
        return f"<table><tbody>{rows}</tbody></table><p><b>{html.escape(self.verdict)}</b></p>"


def _wrapped(prefix: str, text: str) -> list[str]:
    """Text beside a prefix, folded at 100 columns, following lines under its start."""
    return textwrap.wrap(
        text,
        width=100,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )
