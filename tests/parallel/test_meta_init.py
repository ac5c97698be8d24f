"""Models that no rank ever held: shards drawn or loaded in place, equal to the whole to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from labsupport import RankError, Ranks
from labsupport.config import ModelConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.meta_init import init_shards, load_shards, local_piece
from labsupport.parallel.tensor import tensor_parallel, tensor_parallel_by_hand
from labsupport.train.proof_run import PROOF_MODEL

TIED = replace(PROOF_MODEL, tie_word_embeddings=True)
UNEVEN = ModelConfig(
    vocab_size=67, hidden_size=36, intermediate_size=50, num_layers=2, num_heads=6, num_kv_heads=3
)
"""Nothing divides by 4, and most not by 2."""
TOKENS = torch.arange(8).view(1, 8)
Build = Callable[[Llama], Any]


def hybrid(model: Llama) -> Any:
    shape = (2, dist.get_world_size() // 2)
    return fully_sharded(
        model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    )


def both_ways(split: Any) -> Build:
    """FSDP of a model that is tensor-parallel already: rows are cut twice."""

    def build(model: Llama) -> Any:
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        return fully_sharded(split(model, mesh["tp"]), mesh=mesh["dp_shard"])

    return build


def split_only(model: Llama) -> Any:
    return tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def largest_differences(build: Build, config: ModelConfig) -> list[float]:
    """On a rank: of the whole weights to those that one process draws; then loads."""
    with torch.device("meta"):
        model = build(Llama(config))
    found = []
    for fill, seed in ((init_shards, 5), (load_shards, 6)):
        expected = Llama(config, seed=seed)
        whole = {name: param.detach() for name, param in expected.named_parameters()}
        if fill is init_shards:
            init_shards(model, seed=seed)
        else:
            load_shards(model, whole if dist.get_rank() == 0 else None)
        params = dict(model.named_parameters())
        assert params.keys() == whole.keys()
        gaps = [(params[name].full_tensor() - whole[name]).abs().max() for name in whole]
        pieces = [
            torch.equal(params[name].to_local(), local_piece(whole[name], params[name]))
            for name in whole
        ]
        found.append(torch.stack(gaps).max().item() if all(pieces) else float("nan"))
        with torch.no_grad():
            logits = model(TOKENS)  # what is gathered is what was put there
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            torch.testing.assert_close(logits, expected(TOKENS), rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.parametrize("config", [PROOF_MODEL, TIED, UNEVEN], ids=["even", "tied", "uneven"])
@pytest.mark.parametrize("build", [fully_sharded, hybrid, both_ways(tensor_parallel)])
def test_shards_equal_one_process_to_the_bit(
    four: Ranks, build: Build, config: ModelConfig
) -> None:
    if config is UNEVEN and build not in (fully_sharded, hybrid):
        config = replace(UNEVEN, num_kv_heads=2, vocab_size=70)
    assert four.run(largest_differences, build, config) == [[0, 0]] * 4


def test_other_strategies(two: Ranks) -> None:
    for build in (split_only, both_ways(tensor_parallel_by_hand)):
        assert two.run(largest_differences, build, TIED) == [[0, 0]] * 2


def test_one_whole_parameter_at_a_time(two: Ranks) -> None:
    wide = replace(PROOF_MODEL, num_layers=6, vocab_size=256)

    def on_rank() -> tuple[int, int, int]:
        with torch.device("meta"):
            model = fully_sharded(Llama(wide))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            init_shards(model, seed=0)
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        shards = sum(param.to_local().nbytes for param in model.parameters())
        return shards, held, most

    largest = wide.vocab_size * wide.hidden_size * 4
    for shards, held, most in two.run(on_rank):
        assert held == shards == wide.num_params * 4 // 2
        assert 0 <= most - shards - largest < 64  # a scalar or two


def test_on_the_meta_device_nothing_is_sent_or_held(two: Ranks) -> None:
    def on_rank() -> tuple[bool, int]:
        with count_collective_bytes() as counted, torch.device("meta"):
            model = fully_sharded(Llama(ModelConfig.named("llama-3.1-8b")))
        return all(param.is_meta for param in model.parameters()), counted.total_bytes

    assert two.run(on_rank) == [(True, 0)] * 2


def test_weights_that_do_not_fit_are_refused_on_all_ranks(two: Ranks) -> None:
    def on_rank(drop: bool) -> None:
        model = fully_sharded(Llama(PROOF_MODEL))
        weights = dict(Llama(TIED).state_dict())
        if drop:
            del weights["model.norm.weight"]
        else:
            weights["model.norm.weight"] = torch.ones(3)
        load_shards(model, weights if dist.get_rank() == 0 else None)

    for drop, given in ((True, "nothing"), (False, r"\(3,\)")):
        rule = rf"1 of 21 parameters do not fit, first model.norm.weight: rank 0 gives {given}, the"
        with pytest.raises(RankError, match=rule) as error:
            two.run(on_rank, drop)
        assert len(error.value.others) == 1


def test_without_ranks_it_is_init_weights() -> None:
    with torch.device("meta"):
        model = Llama(PROOF_MODEL)
    init_shards(model, seed=3)
    for param, other in zip(
        model.parameters(), Llama(PROOF_MODEL, seed=3).parameters(), strict=True
    ):
        assert torch.equal(param, other)
