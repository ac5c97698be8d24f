"""What can an accelerator or a link do: by its datasheet, and at best as someone measured it?

    accelerator("h100-sxm").matmul_ceiling_flops_per_s     # 794.5e12, measured; datasheet 989e12
    link("nvlink4").one_way_gb_per_s                       # 450.0; the datasheet's 900 is both ways
    link("pcie5-x16").transfer_time_s(64 * 2**20)          # latency + bytes / one-way bandwidth

Two habits of datasheets are undone here. Matrix rates are dense (sheets often print twice that,
"with sparsity"), and link bandwidth is kept one way (sheets often print both ways together).
A figure that no source gave is None, "unknown"; none is guessed.
"""

from __future__ import annotations

from labsupport.hardware.accelerators import ACCELERATORS, Accelerator
from labsupport.hardware.links import LINKS, Link

__all__ = [
    "ACCELERATORS",
    "LINKS",
    "Accelerator",
    "Link",
    "accelerator",
    "accelerator_of",
    "link",
]


def accelerator(name: str) -> Accelerator:
    """The accelerator of that key, as "h100-sxm". Raises ValueError that lists the keys."""
    if name not in ACCELERATORS:
        raise ValueError(f"{name!r} is no known accelerator; known: {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def link(name: str) -> Link:
    """The link of that key, as "nvlink4". Raises ValueError that lists the keys."""
    if name not in LINKS:
        raise ValueError(f"{name!r} is no known link; known: {', '.join(LINKS)}")
    return LINKS[name]


def accelerator_of(nvidia_name: str, memory_bytes: int | None = None) -> Accelerator | None:
    """The entry for a name that nvidia-smi gives ("NVIDIA H100 80GB HBM3"); None when unknown.

    `memory_bytes` tells apart what a name does not. Variants that are not in the table (H100 NVL,
    A100 PCIe) are unknown, not taken for their faster sisters.
    """
    words = set(nvidia_name.upper().replace("-", " ").split())
    gb = (memory_bytes or 0) / 1e9
    if {"A100", "SXM4"} <= words:
        return ACCELERATORS["a100-80gb-sxm" if "80GB" in words or gb > 60 else "a100-40gb-sxm"]
    if "H100" in words and "PCIE" in words:
        return ACCELERATORS["h100-pcie"]
    if {"H100", "80GB", "HBM3"} <= words:
        return ACCELERATORS["h100-sxm"]
    if {"V100", "SXM2"} <= words and ("32GB" in words or gb > 30):
        return ACCELERATORS["v100-32gb-sxm2"]
    if {"RTX", "4090"} <= words and "D" not in words and "LAPTOP" not in words:
        return ACCELERATORS["rtx-4090"]
    simple = {"H200": "h200", "B200": "b200", "L4": "l4", "L40S": "l40s"}
    if "NVL" in words:
        return None
    return next((ACCELERATORS[key] for word, key in simple.items() if word in words), None)
