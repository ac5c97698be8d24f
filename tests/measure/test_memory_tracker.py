"""Bytes by category: a model counted by hand, and torch.profiler's total under every recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from labsupport import Ranks
from labsupport.config import ModelConfig
from labsupport.measure.memory import MemoryTracker
from labsupport.measure.memory_limit import limit_memory
from labsupport.measure.memory_timeline import CATEGORIES, PHASES, MemoryTimeline
from labsupport.model import Llama, token_loss
from labsupport.parallel.fsdp import fully_sharded
from labsupport.parallel.zero import zero1, zero2, zero3

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
)
TOKENS = torch.arange(2 * 96).view(2, 96) % CONFIG.vocab_size
Step = Callable[[], object]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: a second thread would only get in the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def two_matrices() -> tuple[nn.Module, torch.optim.Optimizer]:
    """x (3, 10) -> (3, 20) -> (3, 5): 200 and 100 numbers of 4 bytes."""
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 5, bias=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def small(*, fused: bool = True) -> tuple[Llama, torch.optim.Optimizer]:
    model = Llama(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


def step_of(
    model: Llama, optimizer: torch.optim.Optimizer, *, micro_batches: int = 1, bf16: bool = False
) -> Step:
    def step() -> None:
        for _ in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(TOKENS)
            loss = token_loss(logits, TOKENS).mean
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tracked(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> MemoryTimeline:
    with MemoryTracker(model, optimizer) as memory:
        step()
        step()
    return memory.timeline()


def test_a_model_counted_by_hand_to_the_byte() -> None:
    model, optimizer = two_matrices()
    x = torch.ones(3, 10)

    def step() -> None:
        y = model(x)
        loss = y.sum()
        del y
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    timeline = tracked(model, optimizer, step)
    weights, hidden, scalar = 300 * 4, 3 * 20 * 4, 4
    moments = {name: sample.bytes_of for name, sample in timeline.rows(step=1).items()}
    assert [moments[name]["parameters"] for name in moments] == [weights] * 6
    # What stays: the hidden layer (for the second matrix), loss and its gradient of 1.
    assert moments["after forward"]["activations"] == hidden + 2 * scalar
    assert moments["after backward"]["activations"] == 0 + scalar  # `loss` is still a name
    assert moments["after backward"]["gradients"] == weights
    assert moments["before"]["optimizer"] == moments["after backward"]["optimizer"] == 0
    assert moments["after optimizer"]["optimizer"] == weights
    assert moments["after zero_grad"]["gradients"] == 0
    # The peak: both gradients are there and that of the hidden layer not yet freed.
    first, second = timeline.peak(step=1, phase="backward"), timeline.peak(step=2)
    assert first.bytes_of["temporary"] == hidden
    assert first.total_bytes == 2 * weights + hidden + 2 * scalar + x.nbytes
    assert second.total_bytes == first.total_bytes + weights  # the momentum is there from now on
    assert timeline.at("after", step=2).total_bytes == 2 * weights + x.nbytes
    assert "KiB, measured" in repr(timeline)


def profiled_peak(step: Step) -> int:
    """The most bytes that torch.profiler sees allocated, beyond those that are there already."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    held = most = 0
    for event in sorted(
        (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    ):
        held += event.nbytes()
        most = max(most, held)
    return most


def with_checkpoints(model: Llama) -> None:
    for block in model.model.layers:
        inner = block.forward
        block.forward = lambda *a, inner=inner: checkpoint(inner, *a, use_reentrant=False)


RECIPES = ["fp32", "bf16", "bf16-pure", "accumulate", "checkpoint", "bf16 checkpoint", "not fused"]


@pytest.mark.parametrize("recipe", [*RECIPES, "offload"])
def test_the_peak_is_that_of_the_profiler(recipe: str) -> None:
    model, optimizer = small(fused=recipe != "not fused")
    if recipe == "bf16-pure":
        model.to(torch.bfloat16)
    if "checkpoint" in recipe:
        with_checkpoints(model)
    step = step_of(
        model,
        optimizer,
        micro_batches=3 if recipe == "accumulate" else 1,
        bf16=recipe.startswith("bf16 ") or recipe == "bf16",
    )
    if recipe == "offload":
        inside = step

        def step() -> None:
            with torch.autograd.graph.save_on_cpu():
                inside()

    timeline = tracked(model, optimizer, step)
    before = timeline.rows(step=2)["before"]
    peak = timeline.peak(step=2).total_bytes - before.total_bytes
    most = profiled_peak(step)
    # Checkpointing keeps the state of the random numbers, which passes by every operator.
    unseen = CONFIG.num_layers * torch.get_rng_state().nbytes if "checkpoint" in recipe else 0
    assert 0 <= most - peak <= unseen
    assert timeline.at("after", step=2).total_bytes == before.total_bytes  # nothing leaks


def test_categories_of_a_llama_step() -> None:
    model, optimizer = small()
    timeline = tracked(model, optimizer, step_of(model, optimizer))
    weights = CONFIG.num_params * 4
    logits = TOKENS.numel() * CONFIG.vocab_size * 4
    forward, backward = (timeline.at(name, step=2).bytes_of for name in ("forward", "backward"))
    num_tensors = len(list(model.parameters()))
    assert forward["parameters"] == weights
    assert forward["optimizer"] == 2 * weights + 4 * num_tensors  # two moments, a step count each
    assert forward["gradients"] == 0
    assert backward["gradients"] == weights
    assert backward["activations"] <= 4
    assert forward["logits"] == logits  # the loss keeps its log-probabilities, not the logits
    assert timeline.largest("logits", step=2) == 3 * logits
    assert forward["inputs"] == TOKENS.nbytes
    assert timeline.num_steps == 2
    assert {sample.phase for sample in timeline.samples} == set(PHASES)
    assert list(timeline.samples[0].bytes_of) == list(CATEGORIES)


def test_autocast_keeps_a_copy_of_every_matrix_until_the_backward_pass_is_through() -> None:
    model, optimizer = small()
    timeline = tracked(model, optimizer, step_of(model, optimizer, bf16=True))
    matrices = CONFIG.num_params - CONFIG.vocab_size * CONFIG.hidden_size  # but the embedding
    matrices -= (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size  # and the norms
    assert timeline.at("forward").bytes_of["copies"] == 2 * matrices
    assert timeline.at("backward").bytes_of["copies"] == 0


def test_what_is_recomputed_is_an_activation_again() -> None:
    model, optimizer = small()
    plain = tracked(model, optimizer, step_of(model, optimizer))
    with_checkpoints(model)
    saving = tracked(model, optimizer, step_of(model, optimizer))
    kept = [timeline.at("forward").bytes_of["activations"] for timeline in (plain, saving)]
    assert kept[1] < kept[0] / 3
    one_block = (kept[0] - kept[1]) / CONFIG.num_layers
    assert 0.8 * one_block < saving.largest("activations") - kept[1] < 1.05 * one_block


def test_accumulation_is_one_step_and_a_skipped_step_ends_with_zero_grad() -> None:
    model, optimizer = small()
    assert tracked(model, optimizer, step_of(model, optimizer, micro_batches=2)).num_steps == 2

    def skipped() -> None:
        token_loss(model(TOKENS), TOKENS).mean.backward()
        optimizer.zero_grad()

    timeline = tracked(model, optimizer, skipped)
    assert timeline.num_steps == 2
    assert timeline.at("backward", step=2).bytes_of["optimizer"] > 0


# ---- on ranks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=20) as ranks:
        yield ranks


def on_two_ranks(wrap: Any, *, micro_batches: int = 1) -> tuple[int, MemoryTimeline]:
    """On a rank: the profiler's peak above the tracker's, and the timeline."""
    model = wrap(Llama(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for i in range(micro_batches):
            is_last = i == micro_batches - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            pause = nullcontext() if is_last or isinstance(model, FSDPModule) else model.no_sync()
            with pause:
                token_loss(model(TOKENS), TOKENS).mean.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    timeline = tracked(model, optimizer, step)
    before = timeline.rows(step=2)["before"].total_bytes
    return profiled_peak(step) - (timeline.peak(step=2).total_bytes - before), timeline


WEIGHTS = CONFIG.num_params * 4
ROOT = (2 * CONFIG.vocab_size + 1) * CONFIG.hidden_size * 4
BLOCK = (WEIGHTS - ROOT) // CONFIG.num_layers
WHOLE_BLOCKS = partial(fully_sharded, reshard_after_forward=False)
UNSEEN = range(max(ROOT, BLOCK) + 1)
"""0, but under load gloo's thread holds on to a message, at most a unit, a little longer."""
NARROW = partial(fully_sharded, compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("wrap", "parameters", "gradients", "gathered"),
    [
        (fully_sharded, WEIGHTS // 2, WEIGHTS // 2, ROOT + BLOCK),
        (WHOLE_BLOCKS, WEIGHTS // 2, WEIGHTS // 2, WEIGHTS),
        (NARROW, WEIGHTS // 2, WEIGHTS // 2, (ROOT + BLOCK) // 2),
        (zero1, WEIGHTS, WEIGHTS, 0),
        (zero2, WEIGHTS, WEIGHTS // 2, 0),
        (zero3, WEIGHTS // 2, WEIGHTS // 2, ROOT + BLOCK),
    ],
)
def test_shards_and_what_is_gathered_from_them(
    two: Ranks, wrap: Any, parameters: int, gradients: int, gathered: int
) -> None:
    for unseen, timeline in two.run(on_two_ranks, wrap):
        assert unseen in UNSEEN
        after = timeline.at("backward", step=2).bytes_of
        assert after["parameters"] == parameters
        assert after["gradients"] == gradients
        assert WEIGHTS <= after["optimizer"] < WEIGHTS + 200  # two moments of half, step counts
        assert timeline.largest("gathered", step=2) == gathered
        assert after["gathered"] == 0
        # Beside the shards of what is done, whole gradients of one unit at a time:
        assert timeline.largest("gradients", step=2) <= gradients + max(ROOT, BLOCK)


def test_while_gradients_are_not_exchanged_they_are_whole(two: Ranks) -> None:
    for wrap in (fully_sharded, zero3):
        for unseen, timeline in two.run(on_two_ranks, wrap, micro_batches=2):
            assert unseen in UNSEEN
            assert timeline.largest("gradients", step=2) >= WEIGHTS
            assert timeline.at("backward", step=2).bytes_of["gradients"] == WEIGHTS // 2


def test_an_unknown_moment_is_named() -> None:
    model, optimizer = two_matrices()
    with MemoryTracker(model, optimizer) as memory:
        model(torch.ones(1, 10))
    with pytest.raises(ValueError, match="before of step 1, forward of step 1"):
        memory.timeline().at("backward")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's addresses")
def test_a_limit_stops_what_is_too_large_and_nothing_after_it() -> None:
    with pytest.raises(RuntimeError, match="allocate 1073741824 bytes"), limit_memory(2**28):
        torch.empty(2**28)
    assert torch.empty(2**28).nbytes == 2**30
    with pytest.raises(ValueError, match="for example"), limit_memory(1):
        pass
