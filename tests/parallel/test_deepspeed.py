"""DeepSpeed equals one process in every stage, and holds and sends what its stage promises.

In ranks of its own, since it changes torch in the processes that import it. Skipped where it is not
installed; CI installs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from labsupport import RankError, Ranks
from labsupport.config import TrainConfig
from labsupport.parallel import deepspeed
from labsupport.parallel.deepspeed import deepspeed_config
from labsupport.plan.parameter_shapes import shapes_of
from labsupport.plan.sharding import shard
from labsupport.train.deepspeed_loop import deepspeed_step
from labsupport.train.library_table import _rows_of, compare_libraries, recorded_comparison
from labsupport.train.proof import TOLERANCE
from labsupport.train.proof_run import PROOF_CONFIG, PROOF_MODEL, build, proof_batches
from labsupport.train.sharding_libraries import CATEGORIES, RECIPES, RecipeRun, run_recipe

needs_deepspeed = pytest.mark.skipif(not deepspeed.is_installed(), reason=deepspeed.MISSING)
DEEPSPEED_RECIPES = [name for name, asked in RECIPES.items() if asked]
P = sum(shape.numel for shape in shapes_of(PROOF_MODEL)) * 4
"""Bytes of the parameters in fp32."""
MESSAGES = 128
"""More than all messages about token counts, losses and norms of a step together."""


@pytest.fixture(scope="module")
def apart() -> Iterator[Ranks]:
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def runs(apart: Ranks) -> dict[str, list[RecipeRun]]:
    """Every recipe, on both ranks, two micro batches a step."""
    case: dict[str, Any] = {"model": PROOF_MODEL, "config": PROOF_CONFIG}
    return {recipe: apart.run(run_recipe, recipe, **case) for recipe in RECIPES}


# ---- the JSON file ----------------------------------------------------------------------------


def test_the_json_file_says_what_the_config_says() -> None:
    config = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=3, grad_clip=None)
    said = json.loads(json.dumps(deepspeed_config(2, config=config)))
    assert said["train_micro_batch_size_per_gpu"] == 4
    assert said["gradient_accumulation_steps"] == 3
    assert said["gradient_clipping"] == 0.0
    assert said["zero_optimization"]["stage"] == 2
    assert not {key for key in said["zero_optimization"] if "offload" in key}
    assert said["optimizer"]["params"]["weight_decay"] == config.weight_decay
    offloaded = deepspeed_config(3, config=config, offload_optimizer=True, offload_parameters=True)
    for part in ("offload_optimizer", "offload_param"):
        assert offloaded["zero_optimization"][part] == {"device": "cpu"}


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match="stage=4 is unknown"):
        deepspeed_config(4, config=PROOF_CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload_parameters needs stage=3, not 2"):
        deepspeed_config(2, config=PROOF_CONFIG, offload_parameters=True)
    with pytest.raises(ValueError, match="use 'fp32' or 'bf16'"):
        deepspeed_config(1, config=replace(PROOF_CONFIG, mixed_precision="fp16"))


# ---- equal, held, sent ------------------------------------------------------------------------


@needs_deepspeed
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_equals_one_process(runs: dict[str, list[RecipeRun]], recipe: str) -> None:
    for run in runs[recipe]:
        assert run.loss_difference <= TOLERANCE
        assert run.norm_difference <= TOLERANCE
        assert run.weight_difference <= TOLERANCE
        assert len(run.losses) == 3


@needs_deepspeed
def test_sgd_equals_one_process(apart: Ranks) -> None:
    config = replace(PROOF_CONFIG, optimizer="sgd", grad_clip=None)
    for run in apart.run(run_recipe, "ZeRO-2", model=PROOF_MODEL, config=config):
        assert run.weight_difference <= TOLERANCE


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_states_are_divided_as_the_formula_says(
    runs: dict[str, list[RecipeRun]], stage: int, offload: bool
) -> None:
    places = {(2, True): "ZeRO-2, optimizer on host", (3, True): "ZeRO-3, all on host"}
    recipe = places.get((stage, offload), f"ZeRO-{stage}")
    shapes = shapes_of(PROOF_MODEL)
    plan = shard(shapes, stage=f"zero{stage}", world_size=2).fullest  # type: ignore[arg-type]
    for run in runs[recipe]:
        held = run.held_bytes
        padding = 0.005 * P  # DeepSpeed rounds up what it cuts
        assert held["parameters"] == pytest.approx(plan.parameters_bytes, abs=padding)
        assert held["gradients"] == pytest.approx(plan.gradients_bytes, abs=padding)
        assert held["optimizer"] == pytest.approx(plan.optimizer_bytes, abs=padding)
        assert held["master"] == pytest.approx(P / 2, abs=padding)  # on top of the paper's


@needs_deepspeed
def test_what_fully_shard_holds(runs: dict[str, list[RecipeRun]]) -> None:
    """Parameters and optimizer as ZeRO-3; gradients whole until they are exchanged, once a step."""
    for ours, theirs in zip(runs["fully_shard"], runs["ZeRO-3"], strict=True):
        for category in ("parameters", "optimizer"):
            there = theirs.held_bytes[category]
            assert ours.held_bytes[category] == pytest.approx(there, abs=0.005 * P)
        assert ours.held_bytes["gradients"] == P
        assert ours.held_bytes["master"] == 0


@needs_deepspeed
@pytest.mark.parametrize(
    ("recipe", "sent"),
    [
        # two micro batches: FSDP2 exchanges once, stages 2 and 3 after each
        ("fully_shard", {"reduce_scatter": P}),
        ("ZeRO-1", {"allreduce": P, "allgather": P}),
        ("ZeRO-2", {"allreduce": 2 * P, "allgather": P}),
        ("ZeRO-2, optimizer on host", {"allreduce": 2 * P, "allgather": P}),
        ("ZeRO-3", {"reduce_scatter": 2 * P, "allgather": 4 * P}),
        ("ZeRO-3, all on host", {"reduce_scatter": 2 * P, "allgather": 4 * P}),
    ],
)
def test_what_is_sent(runs: dict[str, list[RecipeRun]], recipe: str, sent: dict[str, int]) -> None:
    for run in runs[recipe]:
        for collective, num_bytes in sent.items():
            assert 0 <= run.exchanged_bytes[collective] - num_bytes < MESSAGES


@needs_deepspeed
@pytest.mark.parametrize("recipe", ["fully_shard", "ZeRO-1", "ZeRO-3"])
def test_bf16_computes_in_two_bytes_beside_an_fp32_master(apart: Ranks, recipe: str) -> None:
    config = replace(PROOF_CONFIG, mixed_precision="bf16")
    for run in apart.run(run_recipe, recipe, model=PROOF_MODEL, config=config):
        assert run.loss_difference < 0.01
        assert run.weight_difference < 0.05
        if recipe != "fully_shard":
            whole = P / 2 if recipe == "ZeRO-1" else P / 4
            assert run.held_bytes["parameters"] == pytest.approx(whole, rel=0.01)
            assert run.held_bytes["master"] == pytest.approx(P / 2, rel=0.01)


def _one_micro_batch_too_few() -> None:
    engine = deepspeed.deepspeed_engine(
        build(PROOF_MODEL, PROOF_CONFIG, seed=0), deepspeed_config(1, config=PROOF_CONFIG)
    )
    try:
        batches = proof_batches(0, config=PROOF_CONFIG, world_size=1)[:1]
        deepspeed_step(engine, batches, config=PROOF_CONFIG, step=0)
    finally:
        engine.destroy()


@needs_deepspeed
def test_a_step_of_another_length_is_refused(apart: Ranks) -> None:
    with pytest.raises(RankError, match="1 micro batches, but the engine was set up for 2 a step"):
        apart.run(_one_micro_batch_too_few)


# ---- side by side -----------------------------------------------------------------------------


@needs_deepspeed
def test_the_table_is_measured_here(apart: Ranks) -> None:
    case: dict[str, Any] = {"model": PROOF_MODEL, "config": PROOF_CONFIG, "timed_steps": 2}
    found = compare_libraries(apart, recipes=("fully_shard", "ZeRO-2"), **case)
    assert found.label == "measured"
    assert found.recipes == ("fully_shard", "ZeRO-2")
    assert set(found.held_bytes("ZeRO-2")) == set(CATEGORIES)
    assert found.step_s("ZeRO-2") > 0
    assert found.loss("fully_shard") == pytest.approx(found.loss("ZeRO-2"), rel=1e-5)
    assert "measured: 2 gloo ranks on cpu" in repr(found)
    assert found._repr_html_().count("<tr>") == 3
    with pytest.raises(ValueError, match="recipe='ZeRO-3' is not in the table; fully_shard"):
        found.step_s("ZeRO-3")
    with pytest.raises(ValueError, match=r"recipes=\['ZeRO-4'\] are unknown"):
        compare_libraries(apart, recipes=("ZeRO-4",))


def test_of_the_ranks_the_fullest_the_slowest_and_the_least_equal_count() -> None:
    first = RecipeRun(
        losses=(3.0, 2.0),
        grad_norms=(1.0, 1.0),
        loss_difference=0.0,
        norm_difference=0.0,
        weight_difference=1e-7,
        held_bytes=dict.fromkeys(CATEGORIES, 8),
        exchanged_bytes={"allreduce": 64},
        step_s=0.2,
    )
    other = replace(first, weight_difference=1e-6, held_bytes=dict.fromkeys(CATEGORIES, 9))
    rows = _rows_of([first, replace(other, step_s=0.1)], "ZeRO-1", on="two ranks")
    values = {(row.quantity.name, row["of"]): row.quantity.value for row in rows}
    assert values["held", "gradients"] == 9
    assert values["step", "median"] == 0.2
    assert values["difference of weights", "all"] == 1e-6
    assert values["loss", "last step"] == 2.0


def test_where_it_is_not_installed_the_recorded_table_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deepspeed, "_ENVIRONMENT", tmp_path)
    assert not deepspeed.is_installed()
    with pytest.raises(ImportError, match="make deepspeed"):
        deepspeed.deepspeed_engine(torch.nn.Linear(2, 2), {})
    found = compare_libraries(None)  # type: ignore[arg-type]
    assert found.label == "recorded"
    assert "make deepspeed" in repr(found)
    assert repr(found) == repr(recorded_comparison())
    assert found.recipes == tuple(RECIPES)
    assert compare_libraries(None, recipes=("ZeRO-3",)).recipes == ("ZeRO-3",)  # type: ignore[arg-type]
    losses = [found.loss(recipe) for recipe in found.recipes]
    assert max(losses) - min(losses) < 1e-4
    monkeypatch.setenv("LABSUPPORT_RECORDED", str(tmp_path))
    with pytest.raises(ImportError, match="nothing was recorded either"):
        compare_libraries(None)  # type: ignore[arg-type]
