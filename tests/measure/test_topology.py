from __future__ import annotations

from pathlib import Path

import pytest

from labsupport.measure import topology
from labsupport.measure.topology import cpu_topology, parse_nvidia_smi_topo, this_machine


def text(name: str) -> str:
    """As `nvidia-smi topo -m` prints it."""
    return (Path(__file__).parent / f"topo_{name}.txt").read_text()


def test_eight_gpus_behind_nvswitch() -> None:
    machine = parse_nvidia_smi_topo(text("eight_gpus"))
    assert [place.name for place in machine.places][:9] == [*(f"GPU{i}" for i in range(8)), "NIC0"]
    assert machine.kind_between("GPU7", "GPU0") == "NV18"
    assert machine.kind_between("GPU3", "NIC3") == "PIX"
    assert machine.groups == ("NUMA node 0", "NUMA node 1")
    group_of = {place.name: place.group for place in machine.places}
    assert group_of["GPU5"] == group_of["NIC5"] == "NUMA node 1"
    path = next(p for p in machine.paths if p.kind == "NV18")
    assert path.meaning == "NVLink, the number says how many"


def test_four_gpus_and_one_card() -> None:
    machine = parse_nvidia_smi_topo(text("four_gpus"))
    assert machine.kind_between("GPU0", "GPU2") == "SYS"
    assert machine.kind_between("GPU0", "GPU1") == "NV4"
    assert machine.kind_between("GPU0", "NIC9") is None
    assert {p.name: p.group for p in machine.places}["NIC0"] == "NUMA node 0"


def test_one_gpu_and_text_that_is_no_matrix() -> None:
    assert parse_nvidia_smi_topo(text("one_gpu")).paths == ()
    with pytest.raises(ValueError, match="nvidia-smi topo -m"):
        parse_nvidia_smi_topo("nvidia-smi: command not found")


def test_cores_by_numa_node(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4"), (1, "2-3")):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    machine = cpu_topology(root=tmp_path, allowed=[0, 1, 2, 4])
    assert machine.groups == ("NUMA node 0", "NUMA node 1")
    assert machine.kind_between("core 0", "core 4") == "MEMORY"
    assert machine.kind_between("core 1", "core 2") == "SYS"
    assert machine.source == "/sys"


def test_without_sys_all_cores_share_a_memory(tmp_path: Path) -> None:
    machine = cpu_topology(root=tmp_path / "none", allowed=[0, 1])
    assert machine.groups == ("NUMA node 0",)
    assert machine.source == "the number of CPUs"


def test_this_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "gpu_count", lambda: 0)
    assert {place.kind for place in this_machine().places} == {"core"}
