"""Hardware tables: hand-checked figures, sources everywhere, nothing guessed."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from labsupport import published
from labsupport.hardware import (
    ACCELERATORS,
    LINKS,
    Accelerator,
    Link,
    accelerator,
    accelerator_of,
    link,
)


def test_loads_with_the_standard_library_alone() -> None:
    code = "import labsupport.hardware; import sys; sys.exit('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=Path(__file__).parents[1])
    assert done.returncode == 0


def test_hand_checked_accelerators() -> None:
    h100 = accelerator("h100-sxm")
    assert h100.bf16_flops_per_s == 989e12  # dense; the sheet prints 1,979 with sparsity
    assert h100.matmul_ceiling_flops_per_s == 794.5e12
    assert h100.memory_bytes == 80e9
    assert h100.memory_bandwidth_gb_per_s == 3350
    assert accelerator("a100-80gb-sxm").memory_bandwidth_gb_per_s == 2039
    assert accelerator("l4").bf16_flops_per_s == 121e12
    assert accelerator("v100-32gb-sxm2").bf16_flops_per_s is None


def test_ceilings_agree_with_the_published_table() -> None:
    path = Path(__file__).parents[1] / "labsupport/published/matmul_ceilings.csv"
    keys = {"a100_sxm": "a100-80gb-sxm", "h100_sxm": "h100-sxm", "b200": "b200"}
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["gpu"] not in keys:
                continue
            gpu = accelerator(keys[row["gpu"]])
            assert gpu.bf16_flops_per_s == pytest.approx(float(row["datasheet_tflops"]) * 1e12)
            assert gpu.matmul_ceiling_flops_per_s == pytest.approx(
                float(row["best_measured_tflops"]) * 1e12
            )


def test_an_unmeasured_ceiling_is_unknown_not_the_datasheet() -> None:
    assert accelerator("h200").matmul_ceiling_flops_per_s is None


@pytest.mark.parametrize("gpu", ACCELERATORS.values(), ids=ACCELERATORS.keys())
def test_accelerators_hang_together(gpu: Accelerator) -> None:
    assert gpu.source
    assert gpu.host_link in LINKS
    assert gpu.gpu_link is None or gpu.gpu_link in LINKS
    assert (gpu.measured_source is None) == (gpu.best_measured_bf16_flops_per_s is None)
    if gpu.best_measured_bf16_flops_per_s is not None:
        assert gpu.bf16_flops_per_s is not None
        assert 0.5 < gpu.best_measured_bf16_flops_per_s / gpu.bf16_flops_per_s < 1


@pytest.mark.parametrize("road", LINKS.values(), ids=LINKS.keys())
def test_links_hang_together(road: Link) -> None:
    assert road.source
    assert "one way" in road.printed or "both ways" in road.printed
    assert (road.latency_source is None) == (road.latency_s is None)
    assert (road.measured_source is None) == (road.best_measured_bytes_per_s is None)
    assert road.best_measured_share is None or 0.7 < road.best_measured_share < 1


def test_one_way_and_two_way() -> None:
    nvlink4 = link("nvlink4")
    assert (nvlink4.one_way_gb_per_s, nvlink4.two_way_gb_per_s) == (450, 900)
    assert nvlink4.printed == "900 GB/s both ways"
    assert link("infiniband-ndr").one_way_gbit_per_s == 400
    assert link("infiniband-ndr").one_way_gb_per_s == 50
    assert link("pcie5-x16").one_way_gb_per_s == pytest.approx(32 * 16 * 128 / 130 / 8, rel=1e-3)


def test_the_best_of_nvlink_4_is_the_best_published_ring() -> None:
    rows = [
        row
        for row in published.collectives()
        if row.gpu in ("h100", "h200") and row.topology == "1x8" and "NVLS on" not in row.note
    ]
    best = max(rows, key=lambda row: row.bus_bandwidth_bytes_per_s)
    nvlink4 = link("nvlink4")
    assert nvlink4.best_measured_bytes_per_s == best.bus_bandwidth_bytes_per_s == 367.6e9
    assert nvlink4.best_measured_share == pytest.approx(0.82, abs=0.005)


def test_transfer_time() -> None:
    assert link("nvlink4").transfer_time_s(450e9) == pytest.approx(1.0 + 0.6e-6)
    assert link("ethernet-10").transfer_time_s(1) is None  # no source gives its latency
    with pytest.raises(ValueError, match="size_bytes=-1"):
        link("nvlink4").transfer_time_s(-1)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"'h1000' is no known accelerator; known: .*h100-sxm"):
        accelerator("h1000")
    with pytest.raises(ValueError, match=r"'nvlink9' is no known link; known: .*nvlink4"):
        link("nvlink9")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-32GB", "v100-32gb-sxm2"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_names_as_nvidia_smi_gives_them(name: str, key: str | None) -> None:
    assert accelerator_of(name) is (None if key is None else accelerator(key))
