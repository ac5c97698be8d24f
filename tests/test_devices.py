"""Device, backend and threads, on machines that are faked down to nvidia-smi and cgroup files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fake_nvidia_smi
import psutil
import pytest

from labsupport import devices

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.machine([H100] * 4))
    monkeypatch.setattr(devices, "cuda_build", lambda: "13.0")


def test_import_loads_no_torch_and_no_psutil() -> None:
    code = (
        "import sys, labsupport.devices as d; d.allowed_cpus(); d.gpu_count(); d.cuda_build(); "
        "d.choose_device(2); sys.exit(any(m in sys.modules for m in ('torch', 'psutil', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("no_gpu")
class TestWithoutGpu:
    def test_ranks_go_to_the_cpu_with_gloo(self) -> None:
        assert devices.gpu_count() == 0
        place = devices.choose_device(2)
        assert (place.device, place.backend) == ("cpu", "gloo")
        assert "no GPU" in place.reason

    def test_cuda_by_name_is_refused_with_what_works(self) -> None:
        with pytest.raises(ValueError, match=r"device='cuda'.*no GPU.*device='cpu' works"):
            devices.choose_device(2, "cuda")

    def test_description(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "allowed_cpus", lambda: 2)
        assert devices.describe() == "2 CPU cores, no GPU"


@pytest.mark.usefixtures("four_gpus")
class TestWithFourGpus:
    def test_enough_gpus_give_nccl(self) -> None:
        for world_size in (1, 4):
            place = devices.choose_device(world_size)
            assert (place.device, place.backend) == ("cuda", "nccl")

    def test_more_ranks_than_gpus_go_to_the_cpu(self) -> None:
        place = devices.choose_device(5)
        assert (place.device, place.backend) == ("cpu", "gloo")
        assert place.reason == "4 GPUs for 5 ranks"

    def test_cuda_by_name_with_too_few_names_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"4 GPUs for 5 ranks; world_size=4 or device='cpu'"):
            devices.choose_device(5, "cuda")

    def test_cpu_by_name_is_kept(self) -> None:
        assert devices.choose_device(2, "cpu").backend == "gloo"

    def test_torch_without_cuda_cannot_use_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "cuda_build", lambda: None)
        assert devices.choose_device(2).backend == "gloo"
        with pytest.raises(ValueError, match="build without CUDA"):
            devices.choose_device(2, "cuda")

    @pytest.mark.parametrize(
        ("value", "indices"),
        [
            ("", []),
            ("-1", []),
            ("2", [2]),
            ("3,1", [3, 1]),
            ("1,9,0", [1]),  # CUDA stops at the first that is none
            ("GPU-2a,0", [2, 0]),
            ("0,0", []),  # CUDA refuses a repeated one
            ("MIG-5c0f,MIG-7", [0]),  # one slice, whatever follows
        ],
    )
    def test_visible_devices(
        self, value: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert [gpu.index for gpu in devices.visible_gpus()] == indices

    def test_description(self) -> None:
        assert devices.describe().endswith(f"4 GPUs ({H100})")


def test_broken_driver_counts_as_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.BROKEN)
    assert devices.gpu_count() == 0
    result = devices.nvidia_smi("-L")
    assert result.found
    assert "code 9" in result.problem
    assert "couldn't communicate" in result.problem


def test_hanging_driver_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi.install(tmp_path, monkeypatch, fake_nvidia_smi.HANGING)
    start = time.monotonic()
    result = devices.nvidia_smi("-L", timeout_s=0.3)
    assert time.monotonic() - start < 3
    assert "did not answer within 0.3 s" in result.problem


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "2"])
def test_world_size_must_be_a_count(world_size: object) -> None:
    with pytest.raises(ValueError, match=r"world_size=.*2 works"):
        devices.choose_device(world_size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world_size="):
        devices.threads_per_rank(world_size)  # type: ignore[arg-type]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda'"):
        devices.choose_device(2, "tpu")


@pytest.mark.parametrize(
    ("cpus", "world_size", "threads"),
    [(2, 1, 2), (2, 2, 1), (2, 8, 1), (16, 2, 8), (16, 3, 5), (1, 4, 1)],
)
def test_ranks_times_threads_stay_within_the_cpus(
    cpus: int, world_size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "allowed_cpus", lambda: cpus)
    assert devices.threads_per_rank(world_size) == threads
    assert threads == 1 or world_size * threads <= cpus


def test_users_thread_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "allowed_cpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert devices.threads_per_rank(2) == 7
    assert devices.threads_per_rank(2, 3) == 3
    assert devices.threads_per_rank(2, env={}) == 1
    assert devices.threads_per_rank(2, env={"OMP_NUM_THREADS": "4,2"}) == 4
    assert devices.threads_per_rank(2, env={"OMP_NUM_THREADS": "many"}) == 1
    with pytest.raises(ValueError, match="0 must be a whole number >= 1"):
        devices.threads_per_rank(2, 0)


class TestCgroups:
    """Files as the kernel writes them, in a folder of our own."""

    def test_v2_quota_of_a_parent_counts(self, tmp_path: Path) -> None:
        root, inner = tmp_path / "cgroup", tmp_path / "cgroup/slice/job"
        inner.mkdir(parents=True)
        (inner / "cpu.max").write_text("max 100000\n")
        (inner.parent / "cpu.max").write_text("150000 100000\n")
        proc = tmp_path / "self"
        proc.write_text("0::/slice/job\n")
        assert devices.cgroup_cpu_quota(proc=proc, root=root) == 1.5

    def test_v1_quota(self, tmp_path: Path) -> None:
        job = tmp_path / "cgroup/cpu,cpuacct/job"
        job.mkdir(parents=True)
        (job / "cpu.cfs_quota_us").write_text("300000\n")
        (job / "cpu.cfs_period_us").write_text("100000\n")
        proc = tmp_path / "self"
        proc.write_text("3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n")
        assert devices.cgroup_cpu_quota(proc=proc, root=tmp_path / "cgroup") == 3.0

    def test_namespaced_cgroup_is_read_at_the_root(self, tmp_path: Path) -> None:
        root = tmp_path / "cgroup"
        root.mkdir()
        (root / "cpu.max").write_text("200000 100000\n")
        proc = tmp_path / "self"
        proc.write_text("0::/../outside\n")
        assert devices.cgroup_cpu_quota(proc=proc, root=root) == 2.0

    def test_no_limit(self, tmp_path: Path) -> None:
        root = tmp_path / "cgroup"
        root.mkdir()
        (root / "cpu.max").write_text("max 100000\n")
        proc = tmp_path / "self"
        proc.write_text("0::/\n")
        assert devices.cgroup_cpu_quota(proc=proc, root=root) is None
        assert devices.cgroup_cpu_quota(proc=tmp_path / "none", root=root) is None

    def test_quota_below_one_cpu_still_allows_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "cgroup_cpu_quota", lambda: 0.4)
        assert devices.allowed_cpus() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_affinity_limits_the_cpus() -> None:
    code = (
        "import os, labsupport.devices as d; "
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(d.allowed_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_loopback_interface_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = psutil.net_if_addrs()
    name = devices.loopback_interface()
    assert any(address.address == "127.0.0.1" for address in addresses[name])
    renamed = {"loopback9" if key == name else key: held for key, held in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: renamed)
    assert devices.loopback_interface() == "loopback9"
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    with pytest.raises(RuntimeError, match="ip link set lo up"):
        devices.loopback_interface()


def test_cuda_build_agrees_with_torch() -> None:
    import torch

    assert devices.cuda_build() == torch.version.cuda


def test_synchronize_on_the_cpu_does_nothing() -> None:
    devices.synchronize("cpu")
