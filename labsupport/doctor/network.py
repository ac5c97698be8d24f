"""Can ranks on this machine find each other, and find ports to talk on?

check_gloo(facts)           # Check("gloo interface", "ok", "lo: a gloo group came up ...")
for check in NETWORK_CHECKS: print(check(facts))
"""

from __future__ import annotations

from labsupport.doctor.facts import Facts
from labsupport.doctor.report import Check

FEW_PORTS = 1000


def check_gloo(facts: Facts) -> Check:
    """The interface that ranks will use exists, has an address, and carried a gloo group."""
    chosen = facts.gloo_ifname or facts.loopback
    if chosen is None:
        return Check(
            "gloo interface",
            "fail",
            "no interface holds 127.0.0.1, where the lab's ranks meet",
            "ip link set lo up",
        )
    unset = f"unset GLOO_SOCKET_IFNAME; the lab then uses {facts.loopback or 'the loopback'}"
    for name in chosen.split(","):
        if name not in facts.interfaces:
            known = ", ".join(facts.interfaces)
            return Check(
                "gloo interface",
                "fail",
                f"GLOO_SOCKET_IFNAME={chosen}: no interface {name!r} here; there are {known}",
                unset,
            )
        if not facts.interfaces[name]:
            return Check(
                "gloo interface", "fail", f"{name} has no IPv4 address for gloo to use", unset
            )
    origin = "by GLOO_SOCKET_IFNAME" if facts.gloo_ifname else "loopback, chosen by the lab"
    if facts.trial.gloo_works:
        return Check(
            "gloo interface",
            "ok",
            f"{chosen} ({origin}): a group came up in {facts.trial.seconds:.1f} s with torch's "
            "import",
        )
    if facts.trial.torch_version is None:
        return Check("gloo interface", "warn", f"{chosen} ({origin}): not tried, torch is missing")
    return Check(
        "gloo interface", "fail", f"{chosen} ({origin}): no group: {facts.trial.problem}", unset
    )


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
