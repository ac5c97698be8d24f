"""Can ranks on this machine find each other, and find ports to talk on?

check_gloo(facts)           # Check("gloo interface", "ok", "lo: a gloo group came up ...")
for check in NETWORK_CHECKS: print(check(facts))
"""

from __future__ import annotations

from labsupport.doctor.facts import Facts
from labsupport.doctor.report import Check

FEW_PORTS = 1000


def check_gloo(facts: Facts) -> Check:
    """A gloo group came up on the loopback interface, and the user's own choice exists too."""
    name, loopback = "gloo interface", facts.loopback
    if loopback is None:
        detail = "no interface holds 127.0.0.1, where the lab's ranks meet"
        return Check(name, "fail", detail, "ip link set lo up")
    if facts.trial.torch_version is None:
        return Check(name, "warn", f"{loopback}: not tried, torch is missing")
    if not facts.trial.gloo_works:
        fix = f"ip link set {loopback} up; ip addr show {loopback}"
        return Check(name, "fail", f"{loopback}: no group: {facts.trial.problem}", fix)
    for chosen in (facts.gloo_ifname or "").split(","):
        if chosen and not facts.interfaces.get(chosen):
            known = ", ".join(facts.interfaces)
            is_there = chosen in facts.interfaces
            why = "it has no IPv4 address" if is_there else f"there are {known}"
            return Check(
                name,
                "warn",
                f"GLOO_SOCKET_IFNAME={facts.gloo_ifname}: no interface {chosen!r} to use here; "
                f"{why}. The lab's local ranks use {loopback}, your own torchrun will fail",
                "unset GLOO_SOCKET_IFNAME",
            )
    seconds = f"{facts.trial.seconds:.1f} s with torch's import"
    return Check(name, "ok", f"{loopback} (loopback): a group came up in {seconds}")


def check_hostname(facts: Facts) -> Check:
    """Plain torchrun and gloo look up the hostname; the lab does not, but says what they find."""
    own = {address for held in facts.interfaces.values() for address in held}
    foreign = [a for a in facts.host_addresses if a not in own and not a.startswith("127.")]
    fix = f"for your own torchrun: add '127.0.0.1 {facts.hostname}' to /etc/hosts"
    if not facts.host_addresses:
        return Check(
            "hostname",
            "warn",
            f"{facts.hostname} resolves to nothing; the lab's own launches do not need it",
            fix,
        )
    if foreign:
        return Check(
            "hostname",
            "warn",
            f"{facts.hostname} resolves to {', '.join(foreign)}, no address of this machine; "
            "the lab's own launches do not need it",
            fix,
        )
    return Check("hostname", "ok", f"{facts.hostname} is {', '.join(facts.host_addresses)}")


def check_ports(facts: Facts) -> Check:
    """The system hands out free ports on the loopback interface."""
    fix = "close programs with many connections (ss -s), or widen net.ipv4.ip_local_port_range"
    if facts.free_port_problem:
        return Check("free ports", "fail", f"on 127.0.0.1: {facts.free_port_problem}", fix)
    if facts.ephemeral_ports is not None and facts.ephemeral_ports < FEW_PORTS:
        return Check("free ports", "warn", f"only {facts.ephemeral_ports} to choose from", fix)
    return Check("free ports", "ok", "the system gives them; the lab uses no fixed port")


NETWORK_CHECKS = (check_gloo, check_hostname, check_ports)
