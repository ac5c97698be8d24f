"""ZeRO in loops of one's own: clipping, steps given up, weights changed by hand, several models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from labsupport import Ranks
from labsupport.parallel.zero import full_parameters, zero1, zero2, zero3

STAGES: dict[str, Any] = {"zero1": zero1, "zero2": zero2, "zero3": zero3}
every_stage = pytest.mark.parametrize("stage", STAGES)


class Net(nn.Module):
    """Rows that divide by neither 2 nor 3, and parameters that are not split."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(6, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.outward = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x) * self.scale
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.outward(h)  # type: ignore[no-any-return]


class Pair:
    """The same net in one process, `one`, and on the ranks, `many`."""

    def __init__(self, stage: str, seed: int = 0, mesh: Any = None) -> None:
        self.one, self.many = Net(seed), STAGES[stage](Net(seed + dist.get_rank()), mesh)
        self.steps = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.one, self.many)]

    def update(self) -> None:
        for optimizer in self.steps:
            optimizer.step()
            optimizer.zero_grad()

    def difference(self) -> float:
        whole = full_parameters(self.many)
        return max((whole[n] - p).abs().max().item() for n, p in self.one.named_parameters())


def of_all(step: int) -> Tensor:
    """A batch for each rank: (ranks, 3, 6)."""
    return torch.randn(dist.get_world_size(), 3, 6, generator=torch.Generator().manual_seed(step))


def backward(pair: Pair, step: int) -> None:
    inputs = of_all(step)
    sum(pair.one(x).square().sum() for x in inputs).div(len(inputs)).backward()  # type: ignore[union-attr]
    pair.many(inputs[dist.get_rank()]).square().sum().backward()


@every_stage
def test_torchs_clipping_sees_the_norm_of_all(two: Ranks, stage: str) -> None:
    def on_rank() -> tuple[float, float]:
        pair, apart = Pair(stage), 0.0
        for step in range(2):
            backward(pair, step)
            for clip in (
                partial(nn.utils.clip_grad_norm_, max_norm=0.5),
                partial(nn.utils.clip_grad_value_, clip_value=0.05),
            ):
                norms = [clip(net.parameters()) for net in (pair.one, pair.many)]
                if norms[0] is not None:
                    apart = max(apart, abs(norms[0].item() / norms[1].item() - 1))
            with torch.no_grad():
                pair.many(of_all(step)[0])  # a look between backward and step changes nothing
            pair.update()
        return apart, pair.difference()

    for apart, difference in two.run(on_rank):
        assert apart < 1e-5
        assert difference < 1e-6


@every_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_given_up_leaves_nothing_after_zero_grad(two: Ranks, stage: str, where: str) -> None:
    def on_rank() -> float:
        pair = Pair(stage)
        with pair.many.no_sync():
            pair.many(of_all(5)[0]).sum().backward()
        if where == "forward":
            with pytest.raises(RuntimeError, match="shapes"):
                pair.many(torch.ones(3, 4))
        else:
            hook = pair.many.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pair.many(of_all(6)[0]).sum().backward()
            hook.remove()
        assert all(isinstance(param, DTensor) for param in pair.many.parameters())
        pair.steps[1].zero_grad()
        pair.many.load_state_dict(Net(9).state_dict())
        pair.one.load_state_dict(Net(9).state_dict())
        backward(pair, 0)
        pair.update()
        return pair.difference()

    assert max(two.run(on_rank)) < 1e-6


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "in place": lambda params: [p.mul_(1.1) for p in params],
    "foreach": lambda params: torch._foreach_mul_(params, 1.1),
    "data": lambda params: [p.data.mul_(1.1) for p in params],
    "rows": lambda params: [getattr(p, "_local_tensor", p).mul_(1.1) for p in params],
    "copies": lambda params: torch._foreach_mul_([p.detach() for p in params], 1.1),
}


@every_stage
def test_weights_changed_by_hand_are_seen_by_all(two: Ranks, stage: str) -> None:
    def on_rank() -> dict[str, float]:
        pair, x, found = Pair(stage), of_all(0)[0], {}
        with torch.no_grad():
            pair.many(x)
            for name, change in CHANGES.items():
                for net in (pair.one, pair.many):
                    change(list(net.parameters()))
                found[name] = (pair.many(x) - pair.one(x)).abs().max().item()
            pair.many.double().float()  # memory of their own for the shards
            change([*pair.one.parameters()])
            change([*pair.many.parameters()])
            found["moved"] = (pair.many(x) - pair.one(x)).abs().max().item()
        return found

    for found in two.run(on_rank):
        assert max(found.values()) < 1e-4, found


@every_stage
def test_two_models_in_one_backward_and_inside_another(four: Ranks, stage: str) -> None:
    """On pairs of four ranks: the mesh is an axis of a larger one."""

    def on_rank() -> float:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "dp_shard"))
        a, b = Pair(stage, 0, grid["dp_shard"]), Pair(stage, 10, grid["dp_shard"])
        outer = nn.ModuleDict({"a": a.many, "b": b.many})
        plain = nn.ModuleDict({"a": Net(3), "b": Net(4)})
        outer.load_state_dict(plain.state_dict())
        for name, pair in (("a", a), ("b", b)):
            pair.one.load_state_dict(plain[name].state_dict())
        for step in range(2):
            inputs = of_all(step)[:2]  # every pair of ranks sees the same
            sum(b.one(a.one(x)).square().sum() for x in inputs).div(2).backward()  # type: ignore[union-attr]
            b.many(a.many(inputs[grid.get_local_rank("dp_shard")])).square().sum().backward()
            a.update()
            b.update()
        return max(a.difference(), b.difference())

    assert max(four.run(on_rank)) < 1e-5


def test_shards_are_not_replaced_by_whole_weights(two: Ranks) -> None:
    def on_rank() -> None:
        with pytest.raises(ValueError, match="would replace the shards; use assign=False"):
            zero1(Net()).load_state_dict(Net().state_dict(), assign=True)

    two.run(on_rank)
