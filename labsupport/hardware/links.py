"""The roads between ranks: one-way bandwidth, latency, and the best that was measured on them.

    nvlink4 = LINKS["nvlink4"]
    nvlink4.one_way_gb_per_s, nvlink4.two_way_gb_per_s      # 450.0, 900.0
    nvlink4.best_measured_share                             # 0.82: healthy, by the 80% rule

A datasheet that says "900 GB/s" counts both directions; "400 Gb/s" on a network port is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIGA = 10**9


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of connection: all NVLinks of one GPU, one x16 slot, or one network port."""

    name: str
    scope: Literal["machine", "network"]
    one_way_bytes_per_s: float
    """Datasheet, in one direction."""
    printed: str
    """How makers and shops put it, and whether that is one way or both ways."""
    latency_s: float | None
    """Of one small message or one step of a ring; None when no source gave one."""
    best_measured_bytes_per_s: float | None
    """Best published bus bandwidth of a ring collective over it (one way, by its convention)."""
    source: str
    latency_source: str | None
    measured_source: str | None

    @property
    def two_way_bytes_per_s(self) -> float:
        """Both directions together."""
        return 2 * self.one_way_bytes_per_s

    @property
    def one_way_gb_per_s(self) -> float:
        """One direction, in GB/s (10^9)."""
        return self.one_way_bytes_per_s / GIGA

    @property
    def two_way_gb_per_s(self) -> float:
        """Both directions together, in GB/s (10^9)."""
        return self.two_way_bytes_per_s / GIGA

    @property
    def one_way_gbit_per_s(self) -> float:
        """One direction, in Gb/s, the unit of network ports."""
        return 8 * self.one_way_gb_per_s

    @property
    def best_measured_share(self) -> float | None:
        """Best measured over datasheet, both one way; None when nothing was measured."""
        if self.best_measured_bytes_per_s is None:
            return None
        return self.best_measured_bytes_per_s / self.one_way_bytes_per_s

    def transfer_time_s(self, size_bytes: float) -> float | None:
        """latency + size / one-way bandwidth, for one message; None where latency is unknown."""
        if size_bytes < 0:
            raise ValueError(f"{size_bytes=} must not be negative; 0 works")
        if self.latency_s is None:
            return None
        return self.latency_s + size_bytes / self.one_way_bytes_per_s


def _link(
    name: str,
    scope: Literal["machine", "network"],
    gb_per_s: float,
    printed: str,
    source: str,
    latency: tuple[float, str] | None = None,
    measured: tuple[float, str] | None = None,
) -> Link:
    """An entry with one-way GB/s, and latency in us and best bus GB/s with their sources."""
    return Link(
        name=name,
        scope=scope,
        one_way_bytes_per_s=float(gb_per_s * GIGA),
        printed=printed,
        source=source,
        latency_s=None if latency is None else latency[0] * 1e-6,
        latency_source=None if latency is None else latency[1],
        best_measured_bytes_per_s=None if measured is None else measured[0] * GIGA,
        measured_source=None if measured is None else measured[1],
    )


_PCIE = "PCI-SIG: transfer rate x 16 lanes x 128/130 coding"
_NVLINK = "NVIDIA datasheets of the GPU; per link in stas00/ml-engineering network"
_IB = "InfiniBand Trade Association roadmap, 4 lanes"
_IEEE = "IEEE 802.3 line rate, framing and TCP not subtracted"
_NCCL = "NCCL, src/graph/tuning.cc: {} ring step with the LL protocol, as its tuner assumes"
_NCCL_NVLINK = (0.6, _NCCL.format("NVLink"))
_NCCL_PCIE = (1.0, _NCCL.format("PCIe"))
_NCCL_NET = (2.7, _NCCL.format("network"))
_TCP = (10.0, "8-byte OSU test over TCP on 100GbE, University of New Mexico, reported by NADDOD")
_BENCH = "stas00/ml-engineering network/benchmarks, "

LINKS: dict[str, Link] = {
    "pcie3-x16": _link(
        "PCIe 3.0 x16", "machine", 15.75, "16 GB/s one way, 32 both ways", _PCIE, _NCCL_PCIE
    ),
    "pcie4-x16": _link(
        "PCIe 4.0 x16", "machine", 31.5, "32 GB/s one way, 64 both ways", _PCIE, _NCCL_PCIE
    ),
    "pcie5-x16": _link(
        "PCIe 5.0 x16", "machine", 63.0, "64 GB/s one way, 128 both ways", _PCIE, _NCCL_PCIE
    ),
    "nvlink2": _link(
        "NVLink 2, 6 links (V100)", "machine", 150, "300 GB/s both ways", _NVLINK, _NCCL_NVLINK
    ),
    "nvlink3": _link(
        "NVLink 3, 12 links (A100)",
        "machine",
        300,
        "600 GB/s both ways",
        _NVLINK,
        _NCCL_NVLINK,
        (234.9, _BENCH + "all_reduce of 16 GiB on 8 A100"),
    ),
    "nvlink4": _link(
        "NVLink 4, 18 links (H100, H200)",
        "machine",
        450,
        "900 GB/s both ways",
        _NVLINK,
        _NCCL_NVLINK,
        (367.6, _BENCH + "all_reduce of 16 GiB on 8 H200, NVLS off"),
    ),
    "nvlink4-bridge": _link(
        "NVLink 4 bridge between two H100 PCIe",
        "machine",
        300,
        "600 GB/s both ways",
        "NVIDIA H100 datasheet, PCIe column",
        _NCCL_NVLINK,
    ),
    "nvlink5": _link(
        "NVLink 5, 18 links (B200)", "machine", 900, "1.8 TB/s both ways", _NVLINK, _NCCL_NVLINK
    ),
    "infiniband-hdr": _link("InfiniBand HDR", "network", 25, "200 Gb/s one way", _IB, _NCCL_NET),
    "infiniband-ndr": _link("InfiniBand NDR", "network", 50, "400 Gb/s one way", _IB, _NCCL_NET),
    "roce-100": _link("RoCE, 100 Gb/s", "network", 12.5, "100 Gb/s one way", _IEEE, _NCCL_NET),
    "roce-200": _link("RoCE, 200 Gb/s", "network", 25, "200 Gb/s one way", _IEEE, _NCCL_NET),
    "roce-400": _link("RoCE, 400 Gb/s", "network", 50, "400 Gb/s one way", _IEEE, _NCCL_NET),
    "ethernet-1": _link("Ethernet, 1 Gb/s", "network", 0.125, "1 Gb/s one way", _IEEE),
    "ethernet-10": _link("Ethernet, 10 Gb/s", "network", 1.25, "10 Gb/s one way", _IEEE),
    "ethernet-25": _link("Ethernet, 25 Gb/s", "network", 3.125, "25 Gb/s one way", _IEEE),
    "ethernet-100": _link("Ethernet, 100 Gb/s", "network", 12.5, "100 Gb/s one way", _IEEE, _TCP),
}
"""PCIe and NVLink are per GPU, networks per port."""
