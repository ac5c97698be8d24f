"""GPU models: memory, bandwidth and matrix rates of their datasheets, and the best rate measured.

ACCELERATORS["h200"].memory_bandwidth_gb_per_s      # 4800.0
ACCELERATORS["h200"].matmul_ceiling_flops_per_s     # None: nobody's measurement is at hand
ACCELERATORS["l4"].bf16_flops_per_s                 # 121e12; the sheet's 242 is with sparsity
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU model. A rate of None is unknown, or the type is not supported."""

    name: str
    memory_bytes: int
    """As sold, in GB of 10^9 bytes. What programs can allocate differs by a few percent."""
    memory_bandwidth_bytes_per_s: float
    bf16_flops_per_s: float | None
    """Datasheet, dense, accumulated in fp32. None for V100, which has no bf16."""
    fp16_flops_per_s: float | None
    """Datasheet, dense, accumulated in fp32."""
    fp8_flops_per_s: float | None
    """Datasheet, dense."""
    fp32_flops_per_s: float | None
    """Datasheet, without tensor cores and TF32."""
    best_measured_bf16_flops_per_s: float | None
    """The best rate that a bf16 matrix multiplication was seen to reach; see `measured_source`."""
    gpu_link: str | None
    """Key in LINKS of its fastest link to other GPUs; None where there is only PCIe."""
    host_link: str
    """Key in LINKS of its link to the host."""
    source: str
    measured_source: str | None

    @property
    def matmul_ceiling_flops_per_s(self) -> float | None:
        """What a bf16 matrix multiplication can really reach; None when nobody measured it.

        The datasheet's peak is not used in its place: no program reaches it.
        """
        return self.best_measured_bf16_flops_per_s

    @property
    def memory_bandwidth_gb_per_s(self) -> float:
        """Datasheet memory bandwidth in GB/s (10^9)."""
        return self.memory_bandwidth_bytes_per_s / GIGA


def _gpu(
    name: str,
    *,
    gb: int,
    gb_per_s: float,
    bf16: float | None,
    fp16: float,
    fp8: float | None,
    fp32: float,
    links: tuple[str | None, str],
    source: str,
    measured: float | None = None,
) -> Accelerator:
    """An entry in a datasheet's units: GB, GB/s, TFLOP/s; `links` to GPUs and to the host."""
    return Accelerator(
        name=name,
        memory_bytes=gb * GIGA,
        memory_bandwidth_bytes_per_s=float(gb_per_s * GIGA),
        bf16_flops_per_s=_tera(bf16),
        fp16_flops_per_s=_tera(fp16),
        fp8_flops_per_s=_tera(fp8),
        fp32_flops_per_s=_tera(fp32),
        best_measured_bf16_flops_per_s=_tera(measured),
        gpu_link=links[0],
        host_link=links[1],
        source=source,
        measured_source=None if measured is None else _MEASURED,
    )


def _tera(tflops: float | None) -> float | None:
    return None if tflops is None else float(tflops * TERA)


_MEASURED = "Maximum achievable matmul FLOPS, stas00/ml-engineering compute/accelerator"
_A100 = "NVIDIA A100 datasheet, nvidia.com/en-us/data-center/a100"
_H100 = "NVIDIA H100 datasheet, nvidia.com/en-us/data-center/h100 (half of its 'with sparsity')"
_ADA = "NVIDIA Ada GPU architecture whitepaper 2.01"

ACCELERATORS: dict[str, Accelerator] = {
    "a100-40gb-sxm": _gpu(
        "NVIDIA A100 SXM 40 GB",
        gb=40,
        gb_per_s=1555,
        bf16=312,
        fp16=312,
        fp8=None,
        fp32=19.5,
        links=("nvlink3", "pcie4-x16"),
        source=_A100,
        measured=271.2,
    ),
    "a100-80gb-sxm": _gpu(
        "NVIDIA A100 SXM 80 GB",
        gb=80,
        gb_per_s=2039,
        bf16=312,
        fp16=312,
        fp8=None,
        fp32=19.5,
        links=("nvlink3", "pcie4-x16"),
        source=_A100,
        measured=271.2,
    ),
    "h100-sxm": _gpu(
        "NVIDIA H100 SXM 80 GB",
        gb=80,
        gb_per_s=3350,
        bf16=989,
        fp16=989,
        fp8=1979,
        fp32=67,
        links=("nvlink4", "pcie5-x16"),
        source=_H100,
        measured=794.5,
    ),
    "h100-pcie": _gpu(
        "NVIDIA H100 PCIe 80 GB",
        gb=80,
        gb_per_s=2000,
        bf16=756,
        fp16=756,
        fp8=1513,
        fp32=51,
        links=("nvlink4-bridge", "pcie5-x16"),
        source=_H100,
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM 141 GB",
        gb=141,
        gb_per_s=4800,
        bf16=989,
        fp16=989,
        fp8=1979,
        fp32=67,
        links=("nvlink4", "pcie5-x16"),
        source="NVIDIA H200 datasheet, nvidia.com/en-us/data-center/h200 (half of sparse)",
    ),
    "b200": _gpu(
        "NVIDIA B200 (HGX, DGX) 180 GB",
        gb=180,
        gb_per_s=8000,
        bf16=2250,
        fp16=2250,
        fp8=4500,
        fp32=80,
        links=("nvlink5", "pcie5-x16"),
        source="NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s over 8 GPUs), Blackwell brief",
        measured=1745,
    ),
    "v100-32gb-sxm2": _gpu(
        "NVIDIA V100 SXM2 32 GB",
        gb=32,
        gb_per_s=900,
        bf16=None,
        fp16=125,
        fp8=None,
        fp32=15.7,
        links=("nvlink2", "pcie3-x16"),
        source="NVIDIA V100 datasheet, nvidia.com/en-us/data-center/v100",
    ),
    "l4": _gpu(
        "NVIDIA L4 24 GB",
        gb=24,
        gb_per_s=300,
        bf16=121,
        fp16=121,
        fp8=242.5,
        fp32=30.3,
        links=(None, "pcie4-x16"),
        source="NVIDIA L4 datasheet, nvidia.com/en-us/data-center/l4 (half of 'with sparsity')",
    ),
    "l40s": _gpu(
        "NVIDIA L40S 48 GB",
        gb=48,
        gb_per_s=864,
        bf16=362.05,
        fp16=362.05,
        fp8=733,
        fp32=91.6,
        links=(None, "pcie4-x16"),
        source="NVIDIA L40S datasheet, nvidia.com/en-us/data-center/l40s",
    ),
    "rtx-4090": _gpu(
        "NVIDIA GeForce RTX 4090 24 GB",
        gb=24,
        gb_per_s=1008,
        bf16=165.2,
        fp16=165.2,
        fp8=330.3,
        fp32=82.6,
        links=(None, "pcie4-x16"),
        source=f"{_ADA}, rates with fp32 accumulation",
    ),
}
"""Best measured rates are the source's for "A100 SXM" (both sizes), "H100 SXM" and "B200"."""
