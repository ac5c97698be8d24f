"""torch's tensor parallelism: equal to one process, alone and with all that comes after it.

fully_shard over another axis, a start on the meta device; and tied embeddings are one parameter
again. Narrow types and ways of recomputation are in test_parity_shards.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from labsupport import Ranks
from labsupport.checkpoint.gather import full_state_dict
from labsupport.config import ModelConfig, ParallelConfig
from labsupport.model import Llama, token_loss
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.layout import Layout
from labsupport.parallel.meta_init import init_shards
from labsupport.parallel.tensor import tensor_parallel, tensor_parallel_by_hand
from labsupport.train.proof import prove_equal
from labsupport.train.proof_run import PROOF_CONFIG
from tests.parallel.test_tensor_by_hand import ONE_KV_HEAD, RECIPES, TIED, UNEVEN, Recipe

CHECKPOINTED = replace(PROOF_CONFIG, activation_checkpointing="full")


def split(
    model: Llama,
    layout: Layout,
    *,
    sequence_parallel: bool = False,
    recipe: Recipe = tensor_parallel,
) -> Llama:
    assert layout.mesh is not None
    return recipe(model, layout.mesh["tp"], sequence_parallel=sequence_parallel)


def split_and_sharded(model: Llama, layout: Layout, **how: Any) -> Any:
    return fully_sharded(split(model, layout, **how), mesh=layout.fsdp_mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", [UNEVEN, ONE_KV_HEAD])
def test_equal_to_one_process(two: Ranks, model: ModelConfig, sequence_parallel: bool) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence_parallel)
    wrap = partial(split, sequence_parallel=sequence_parallel)
    proof = prove_equal(two, wrap, parallel=parallel, model=model, config=CHECKPOINTED)
    assert proof.is_equal, proof


@pytest.mark.parametrize(
    ("recipe", "model", "sharding", "sequence_parallel"),
    [
        (tensor_parallel_by_hand, TIED, "fsdp", True),
        (tensor_parallel, UNEVEN, "fsdp", False),
        (tensor_parallel_by_hand, ONE_KV_HEAD, "ddp", False),
        (tensor_parallel, ONE_KV_HEAD, "ddp", True),
    ],
)
def test_further_axes_on_four_ranks(
    four: Ranks, recipe: Recipe, model: ModelConfig, sharding: str, sequence_parallel: bool
) -> None:
    """fsdp: shards of shards; ddp: fully_shard where only dp_replicate has ranks."""
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=2,
        data_parallel_sharding=sharding,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
    )
    wrap = partial(split_and_sharded, recipe=recipe, sequence_parallel=sequence_parallel)
    proof = prove_equal(four, wrap, parallel=parallel, model=model, config=CHECKPOINTED)
    assert proof.is_equal, proof


def step_from_meta(recipe: Recipe, model: ModelConfig) -> tuple[float, float, set[str]]:
    """On a rank: how far weights and gradients are from one process; gradients cut differently."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        started = Llama(model)
    split_model = recipe(started, mesh, sequence_parallel=True)
    assert all(param.is_meta for param in split_model.parameters())
    init_shards(split_model, seed=3)
    alone, ids = Llama(model, seed=3), torch.arange(16).view(2, 8)
    with loss_parallel():
        token_loss(split_model(ids), ids).sum.backward()
    token_loss(alone(ids), ids).sum.backward()
    weights, gradients, cut_differently = [0.0], [0.0], set()
    whole = dict(alone.named_parameters())
    for name, param in split_model.named_parameters():
        grad: Any = param.grad
        weights.append(float((param.full_tensor() - whole[name]).abs().max()))  # type: ignore[operator]
        gradients.append(float((grad.full_tensor() - whole[name].grad).abs().max()))
        if grad.placements != param.placements:  # type: ignore[attr-defined]
            cut_differently.add(name)
    return max(weights), max(gradients), cut_differently


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [TIED, ONE_KV_HEAD])
def test_start_on_the_meta_device(two: Ranks, recipe: Recipe, model: ModelConfig) -> None:
    """Gradients are reduced and cut as their weights, though these are other tensors by then."""
    for weights, gradients, cut_differently in two.run(step_from_meta, recipe, model):
        assert weights == 0
        assert gradients < 1e-4
        assert cut_differently == set()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tied_embeddings_stay_one_parameter_and_are_saved_whole(two: Ranks, recipe: Recipe) -> None:
    def on_rank() -> tuple[bool, int, dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = recipe(Llama(TIED, seed=5), mesh)
        is_one = model.lm_head.weight is model.model.embed_tokens.weight
        return is_one, len(list(model.parameters())), full_state_dict(model)

    whole = Llama(TIED, seed=5)
    (first, num_params, saved), (second, _, nothing) = two.run(on_rank)
    assert first
    assert second
    assert num_params == len(list(whole.parameters()))
    assert nothing == {}
    for name, weight in whole.state_dict().items():
        assert torch.equal(saved[name], weight)


@pytest.mark.slow
def test_compiled_blocks(two: Ranks) -> None:
    def on_rank() -> tuple[float, dict[str, int]]:
        torch._dynamo.reset()
        mesh, ids = (
            init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
            torch.arange(16).view(2, 8),
        )
        alone = Llama(replace(TIED, num_layers=1), seed=0)
        model = tensor_parallel(
            Llama(replace(TIED, num_layers=1), seed=0), mesh, sequence_parallel=True
        )
        model.model.layers[0].compile()
        with loss_parallel():
            token_loss(model(ids), ids).sum.backward()
        token_loss(alone(ids), ids).sum.backward()
        whole = dict(alone.named_parameters())
        differences = [
            (p.grad.full_tensor() - whole[n].grad).abs().max() for n, p in model.named_parameters()
        ]
        return float(max(differences)), dict(torch._dynamo.utils.counters["graph_break"])

    for difference, graph_breaks in two.run(on_rank):
        assert difference < 1e-4
        assert graph_breaks == {}
