"""One norm for gradients that lie on ranks in any way, the same everywhere; and one cut for all."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from labsupport import Ranks
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.train.gradients import clip_gradients, gradient_norm


def whole_ones() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (4, 4), (3, 2), (1, 6), (7,), (2, 2)]
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def on_meshes() -> list[torch.Tensor]:
    """The same, plain and cut over one axis or two; the fourth has no row for rank 1."""
    plain, *rest = whole_ones()
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    ways = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Replicate(), Replicate()]),
    ]
    return [plain] + [distribute_tensor(t, *way) for t, way in zip(rest, ways, strict=True)]


def test_norm_and_clipping_of_a_mixture(two: Ranks) -> None:
    def on_rank() -> tuple[float, int, list[torch.Tensor]]:
        gradients = on_meshes()
        with count_collective_bytes() as counted:
            norm = gradient_norm(gradients).item()
        clip_gradients(gradients, norm=norm, scale=2.0, largest=0.25)
        clipped = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        return norm, counted.calls, clipped

    whole = whole_ones()
    expected = torch.cat([tensor.flatten() for tensor in whole]).norm().item()
    for norm, calls, clipped in two.run(on_rank):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert calls == 1  # one a group, whatever the number of tensors and meshes
        length = torch.cat([tensor.flatten() for tensor in clipped]).norm().item()
        assert length == pytest.approx(0.25, rel=1e-4)
        assert torch.allclose(clipped[1] * expected / 0.25, whole[1], rtol=1e-4)


def test_plain_gradients_need_no_group() -> None:
    gradients = [torch.full((2, 2), 3.0), torch.zeros(0, 4), torch.full((7,), 4.0)]
    assert gradient_norm(gradients).item() == pytest.approx((4 * 9 + 7 * 16) ** 0.5)


def test_a_sum_that_is_not_finished_is_no_gradient(two: Ranks) -> None:
    def on_rank() -> str:
        mesh = init_device_mesh("cpu", (2,))
        try:
            gradient_norm([DTensor.from_local(torch.ones(2), mesh, [Partial()])])
        except AssertionError as error:
            return str(error)
        return ""

    assert two.run(on_rank) == ["a gradient was not reduced yet"] * 2
