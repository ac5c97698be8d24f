"""Can this machine run the lab, in which tier, and what would make it better?

    from labsupport.doctor import run_checks
    report = run_checks()           # a page in a notebook, text under print()
    report.can_run, report["gloo"].fix

`gather()` asks the machine once and returns plain facts; every check is a pure function of them.
A check that fails means that the lab cannot run; a warning names what will be slower or missing.
"""

from __future__ import annotations

from labsupport.doctor.facts import Facts, gather
from labsupport.doctor.machine import MACHINE_CHECKS
from labsupport.doctor.network import NETWORK_CHECKS
from labsupport.doctor.report import Check, Report
from labsupport.doctor.software import SOFTWARE_CHECKS

__all__ = ["Check", "Facts", "Report", "gather", "run_checks"]


def run_checks(facts: Facts | None = None) -> Report:
    """All checks, on this machine or on given facts. Takes about as long as importing torch."""
    known = gather() if facts is None else facts
    checks = [check(known) for check in (*SOFTWARE_CHECKS, *MACHINE_CHECKS, *NETWORK_CHECKS)]
    return Report(checks=tuple(checks), tier=_tier(known))


def _tier(facts: Facts) -> str:
    """The best tier here; those with GPUs need a torch built for them too."""
    if facts.gpus and facts.torch_cuda is not None:
        if len(facts.gpus) == 1:
            return "one-GPU tier, 1 rank with nccl, more ranks on the CPU with gloo"
        return f"{len(facts.gpus)}-GPU tier, a rank a GPU with nccl"
    cores = facts.cpus_allowed
    return f"CPU tier, {max(2, cores)} ranks with gloo on {cores} CPU core{'s'[: cores != 1]}"
