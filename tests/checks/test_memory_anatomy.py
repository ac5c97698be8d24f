"""The checks of notebook 03: blank stubs, right answers, usual mistakes with their hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labsupport.checks import memory_anatomy as check
from labsupport.config import MixedPrecision, ModelConfig
from labsupport.plan import training_memory
from labsupport.plan.memory import TrainingMemory


def test_states_of_sgd() -> None:
    assert check.states_of_sgd({"with momentum": ..., "without": ...}).status == "blank"
    assert check.states_of_sgd({"with momentum": 12, "without": 8}).is_right
    assert "two moments" in check.states_of_sgd({"with momentum": 16, "without": 8}).hint
    assert "are two" in check.states_of_sgd({"with momentum": 12, "without": 4}).hint
    assert "momentum remember" in check.states_of_sgd({"with momentum": 8, "without": 8}).hint
    assert "plain SGD" in check.states_of_sgd({"with momentum": 12, "without": 12}).hint
    assert not check.states_of_sgd(12).is_right
    assert not check.states_of_sgd({"with momentum": "much", "without": 8}).is_right


def test_untied_head() -> None:
    matrix = 128_256 * 2048
    assert check.untied_head(...).status == "blank"
    assert check.untied_head(16 * matrix / 2**30).is_right
    assert "come with it" in check.untied_head(4 * matrix / 2**30).hint
    assert "GiB are wanted" in check.untied_head(16 * matrix / 1e9).hint
    assert "two moments" in check.untied_head(12 * matrix / 2**30).hint
    assert "those are bytes" in check.untied_head(16 * matrix).hint
    assert "does each cost" in check.untied_head(matrix).hint


def largest(
    peak: Callable[[TrainingMemory], int], precision: MixedPrecision = "bf16"
) -> Callable[[ModelConfig, int, int], int]:
    def search(config: ModelConfig, seq_len: int, budget_bytes: int) -> int:
        batch = 0
        while True:
            plan = training_memory(
                config, micro_batch_size=batch + 1, seq_len=seq_len, precision=precision
            )
            if peak(plan) > budget_bytes:
                return batch
            batch += 1

    return search


def in_proportion(config: ModelConfig, seq_len: int, budget_bytes: int) -> int:
    plan = training_memory(config, micro_batch_size=1, seq_len=seq_len, precision="bf16")
    return budget_bytes // plan.peak_bytes


def stub(*arguments: Any) -> Any: ...


def test_largest_batch() -> None:
    assert check.largest_batch(stub).status == "blank"
    assert check.largest_batch(largest(lambda plan: plan.peak_bytes)).is_right
    assert "later peak" in check.largest_batch(largest(lambda plan: plan.first_peak_bytes)).hint
    forgotten = largest(lambda plan: plan.states_bytes + plan.activations_bytes)
    assert "not all" in check.largest_batch(forgotten).hint
    right = largest(lambda plan: plan.peak_bytes)
    assert "one too many" in check.largest_batch(lambda *case: right(*case) + 1).hint
    assert "0 is wanted" in check.largest_batch(lambda *case: max(1, right(*case))).hint
    assert "fp32" in check.largest_batch(largest(lambda plan: plan.peak_bytes, "fp32")).hint
    assert "there once" in check.largest_batch(in_proportion).hint
    assert not check.largest_batch(lambda config, seq_len, budget_bytes: 7).is_right
    assert "TypeError" in check.largest_batch(lambda config: 7).hint
    assert not check.largest_batch(7).is_right


def test_out_of_memory() -> None:
    fine = {"reserved_gib": 76.25, "non_torch_gib": 1.6, "enough_if_tidied": True}
    assert check.out_of_memory(dict.fromkeys(fine, ...)).status == "blank"
    assert check.out_of_memory(fine).is_right
    assert "both parts" in check.out_of_memory({**fine, "reserved_gib": 9.85}).hint
    assert "is allocated" in check.out_of_memory({**fine, "reserved_gib": 66.4}).hint
    assert "not reserved" in check.out_of_memory({**fine, "reserved_gib": 77.5}).hint
    assert "not only" in check.out_of_memory({**fine, "non_torch_gib": 11.45}).hint
    assert "what is free" in check.out_of_memory({**fine, "non_torch_gib": 12.7}).hint
    assert "without quotes" in check.out_of_memory({**fine, "enough_if_tidied": "True"}).hint
    assert "nobody's" in check.out_of_memory({**fine, "non_torch_gib": 2.85}).hint
    assert "in pieces" in check.out_of_memory({**fine, "enough_if_tidied": False}).hint
    assert not check.out_of_memory([1, 2, 3]).is_right


def chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int) -> Tensor:
    parts = zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), strict=True)
    losses = [checkpoint(chunk_loss, h, weight, y, use_reentrant=False) for h, y in parts]
    return torch.stack(losses).sum()


def keeping_all(hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int) -> Tensor:
    parts = zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), strict=True)
    return torch.stack([chunk_loss(h, weight, y) for h, y in parts]).sum()


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (keeping_all, "Compute it again instead"),
        (lambda h, w, y, n: in_chunks(h, w, y, n) / len(y), "that is the mean"),
        (lambda h, w, y, n: in_chunks(h[:-1], w, y[:-1], n), "loss is not that"),
        (lambda h, w, y, n: in_chunks(h.detach(), w, y, n), "gradient of hidden"),
        (lambda h, w, y, n: in_chunks(h, w, y, 1), "all logits exist at once"),
        (lambda h, w, y, n: h @ w, "it raises RuntimeError"),
        (lambda h, w, y, n: in_chunks(h, w, y, n).item(), "no .item()"),
        (lambda h, w, y, n: in_chunks(h, w, y, n).detach(), "no .detach()"),
        (lambda h, w, y, n: [in_chunks(h, w, y, n)], "no list"),
        (7, "a function is wanted"),
    ],
)
def test_chunked_loss_tells_a_mistake(answer: Any, hint: str) -> None:
    assert hint in check.chunked_loss(answer).hint


def test_chunked_loss() -> None:
    assert check.chunked_loss(stub).status == "blank"
    assert check.chunked_loss(in_chunks).is_right
