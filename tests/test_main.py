"""The command line: real processes, exit codes, and one clear line for a wrong request."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from labsupport.__main__ import main
from labsupport.doctor import gather, run_checks


def labsupport(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labsupport", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )


def test_doctor_as_json() -> None:
    done = labsupport("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["can_run"] is True
    assert {check["status"] for check in told["checks"]} <= {"ok", "warn"}
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in told["checks"])


def test_doctor_page_with_an_odd_interface() -> None:
    done = labsupport("doctor", GLOO_SOCKET_IFNAME="docker9")
    assert done.returncode == 0, "the lab's own ranks do not use it"
    assert "no interface 'docker9' to use here" in done.stdout
    assert "fix: unset GLOO_SOCKET_IFNAME" in done.stdout
    assert "gloo interface" in done.stdout.splitlines()[-1]


def test_doctor_ends_with_1_where_the_lab_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = dataclasses.replace(gather(), unwritable={"/lab": "Read-only file system"})
    report = run_checks(facts)
    monkeypatch.setattr("labsupport.doctor.run_checks", lambda: report)
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "This machine cannot run the lab yet: mend disk."


def test_bench_collectives_as_json() -> None:
    done = labsupport(
        "bench", "collectives", "--nproc", "2", "--op", "all_reduce", "--op", "broadcast",
        "--max-size", "2K", "--budget", "0.01", "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["label"] == "measured"
    rows = [(row["collective"], row["world_size"], row["size_bytes"]) for row in told["rows"]]
    assert rows == [
        ("all_reduce", 2, 1024),
        ("all_reduce", 2, 2048),
        ("broadcast", 2, 1024),
        ("broadcast", 2, 2048),
    ]
    assert all(row["bus_bandwidth_bytes_per_s"] > 0 for row in told["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are required: COMMAND"),
        ("doktor", "invalid choice: 'doktor' (choose from"),
        ("doctor --yes", "unrecognized arguments: --yes"),
        ("bench", "arguments are required: WHAT"),
        ("bench collectives --nproc two", "'two' must be a whole number of at least 1; 2 works"),
        ("bench collectives --nproc 0", "'0' must be a whole number of at least 1; 2 works"),
        ("bench collectives --max-size 1X", "'1X' must be a whole number of bytes"),
        ("bench collectives --max-size 512", "max_bytes=512"),
        ("bench collectives --budget nan", "'nan' must be a number of seconds above 0; 0.2 works"),
        ("bench collectives --op gossip", "--op 'gossip' is no known collective; all, all_reduce"),
        ("bench collectives --device tpu", "'auto', 'cpu' or 'cuda'"),
        ("bench collectives --device cuda --nproc 999", "device='cpu'"),
    ],
)
def test_a_wrong_request_gets_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = int(str(stop.code))
    told = capsys.readouterr()
    assert code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_failure_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("no space left")

    monkeypatch.setattr("labsupport.doctor.run_checks", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "labsupport: OSError: no space left\n"


def test_help_lists_only_what_there_is() -> None:
    done = labsupport("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "bench" in done.stdout
    assert "serve" not in done.stdout
