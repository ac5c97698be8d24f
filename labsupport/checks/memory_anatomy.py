"""Exercises of notebook 03: states of SGD, a tied head, the largest batch, a GPU's log, the loss.

from labsupport.checks import memory_anatomy as check
check.states_of_sgd({"with momentum": ..., "without": ...})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labsupport.checks import Verdict, blank, function, is_blank, not_yet, number, right
from labsupport.config import MixedPrecision, ModelConfig
from labsupport.measure.memory import MemoryTracker
from labsupport.plan import TrainingMemory, training_memory

GIB = 2**30
TOKENS, HIDDEN, VOCAB, CHUNKS = 240, 16, 1024, 8

OUT_OF_MEMORY = """\
OutOfMemoryError: CUDA out of memory. Tried to allocate 2.94 GiB. GPU 0 has a total capacity of
79.10 GiB of which 1.25 GiB is free. Of the allocated memory 66.40 GiB is allocated by PyTorch, and
9.85 GiB is reserved by PyTorch but unallocated."""
"""Made up, in the words of PyTorch's message."""


def states_of_sgd(answer: Any) -> Verdict:
    """Bytes a parameter of parameters, gradients and optimizer, in fp32, with SGD."""
    if is_blank(answer):
        return blank()
    expected = {"with momentum": 12.0, "without": 8.0}
    if not isinstance(answer, dict) or set(answer) != set(expected):
        return not_yet(f"a dict with the keys {list(expected)} is wanted")
    both = {
        4.0: "that is one copy: weights and gradients are two",
        16.0: "that is AdamW, which keeps two moments",
    }
    own = {
        "with momentum": {8.0: "weight and gradient; what does momentum remember?"},
        "without": {12.0: "plain SGD keeps nothing from step to step"},
    }
    for key, value in expected.items():
        verdict = number(answer[key], value, hints=both | own[key])
        if not verdict.is_right:
            return verdict if verdict.status == "blank" else not_yet(f"{key!r}: {verdict.hint}")
    return right("Half of AdamW's without momentum: whether it learns as well is another question.")


def untied_head(answer: Any) -> Verdict:
    """GiB that the states of 1b grow by when its head gets a matrix of its own."""
    config = ModelConfig.named("1b")
    matrix = config.vocab_size * config.hidden_size
    hints = {
        4 * matrix / GIB: "the matrix alone; gradient and moments come with it",
        8 * matrix / GIB: "matrix and gradient; AdamW keeps two numbers more for each",
        12 * matrix / GIB: "three numbers for each; AdamW keeps two moments, not one",
        16 * matrix / 1e9: "GiB are wanted (2^30 bytes), not GB",
        16 * matrix: "those are bytes; divide by 2^30",
        matrix: "that many numbers; how many bytes does each cost?",
        16 * config.num_params / GIB: "that is the whole model",
    }
    why = "A fifth more states, for the same activations and logits."
    return number(answer, 16 * matrix / GIB, rel=0.005, hints=hints, why=why)


def largest_batch(answer: Any) -> Verdict:
    """`largest_batch(config, seq_len, budget_bytes)`: most sequences whose peak fits, bf16."""
    cases = [
        ((ModelConfig.named(name), seq_len, budget * GIB), _largest(name, seq_len, budget * GIB))
        for name, seq_len, budget in (("125m", 1024, 16), ("1b", 1024, 80), ("1b", 8192, 40))
    ]
    verdict = function(
        answer,
        cases,
        rel=1e-9,
        why="0 where not even one sequence fits: then another cure is needed.",
    )
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    for wrong, hint in _WRONG_BATCHES:
        if _gives(answer, [(case, wrong(*case)) for case, _ in cases]):
            return not_yet(hint)
    return verdict


def _plan(
    config: ModelConfig, seq_len: int, batch: int, precision: MixedPrecision = "bf16"
) -> TrainingMemory:
    return training_memory(config, micro_batch_size=batch, seq_len=seq_len, precision=precision)


def _largest(name: str, seq_len: int, budget_bytes: int) -> int:
    return _largest_by(ModelConfig.named(name), seq_len, budget_bytes, lambda plan: plan.peak_bytes)


def _largest_by(
    config: ModelConfig,
    seq_len: int,
    budget_bytes: int,
    peak: Callable[[TrainingMemory], int],
    precision: MixedPrecision = "bf16",
) -> int:
    batch = 0
    while True:
        if peak(_plan(config, seq_len, batch + 1, precision)) > budget_bytes:
            return batch
        batch += 1


_WRONG_BATCHES: list[tuple[Callable[[ModelConfig, int, int], int], str]] = [
    (
        lambda config, s, budget: _largest_by(config, s, budget, lambda p: p.first_peak_bytes),
        "the first step fits, the second does not: ask for the later peak",
    ),
    (
        lambda config, s, budget: _largest_by(config, s, budget, lambda p: p.peak_bytes) + 1,
        "one too many: that batch no longer fits",
    ),
    (
        lambda config, s, budget: _largest_by(
            config, s, budget, lambda p: p.states_bytes + p.activations_bytes
        ),
        "states and activations are not all: what is held at the peak?",
    ),
    (
        lambda config, s, budget: _largest_by(config, s, budget, lambda p: p.peak_bytes, "fp32"),
        'that counts in fp32; precision="bf16" is wanted',
    ),
    (
        lambda config, s, budget: budget // _plan(config, s, 1).peak_bytes,
        "the peak does not grow in step with the batch: the states are there once. Try batches",
    ),
    (
        lambda config, s, budget: max(1, _largest_by(config, s, budget, lambda p: p.peak_bytes)),
        "one case is too large even for a single sequence: 0 is wanted there",
    ),
]


def _gives(answer: Callable[..., Any], cases: list[tuple[tuple[Any, ...], int]]) -> bool:
    try:
        return all(answer(*arguments) == expected for arguments, expected in cases)
    except Exception:  # whatever it raises, `function` has told it
        return False


def out_of_memory(answer: Any) -> Verdict:
    """What `OUT_OF_MEMORY` says: reserved_gib, non_torch_gib, and whether tidying up would do."""
    if is_blank(answer):
        return blank()
    wanted = {"reserved_gib", "non_torch_gib", "enough_if_tidied"}
    if not isinstance(answer, dict) or set(answer) != wanted:
        return not_yet(f"a dict with the keys {sorted(wanted)} is wanted")
    reserved = number(
        answer["reserved_gib"],
        66.40 + 9.85,
        rel=1e-3,
        hints={
            9.85: "that part is unallocated; reserved is both parts together",
            66.40: "that part is allocated; the allocator holds more than that",
            66.40 + 9.85 + 1.25: "what is free is not reserved",
        },
    )
    if not reserved.is_right:
        return not_yet(f"reserved_gib: {reserved.hint}")
    other = number(
        answer["non_torch_gib"],
        79.10 - 1.25 - 76.25,
        rel=1e-2,
        hints={
            79.10 - 76.25: "the free memory is nobody's",
            79.10 - 1.25 - 66.40: "take off all that is reserved, not only what is allocated",
            79.10 - 66.40: "take off what is reserved and what is free",
        },
    )
    if not other.is_right:
        return not_yet(f"non_torch_gib: {other.hint}")
    if not isinstance(answer["enough_if_tidied"], bool):
        return not_yet("enough_if_tidied: True or False is wanted, without quotes")
    if not answer["enough_if_tidied"]:
        return not_yet("enough_if_tidied: 9.85 GiB lie idle in pieces; 2.94 are asked for")
    return right(
        "Fragmentation: PYTORCH_ALLOC_CONF=expandable_segments:True lets pieces grow together."
    )


def chunked_loss(answer: Any) -> Verdict:
    """`chunked_loss(hidden, weight, labels, num_chunks)`: the summed loss, few logits at a time.

    It is run: same loss, same gradients, and the bytes of logits that it held at most.
    """
    if is_blank(answer):
        return blank()
    if not callable(answer):
        return not_yet("a function is wanted")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    whole, expected = _run(_whole_loss, hidden, labels)
    try:
        held, found = _run(answer, hidden, labels)
    except Exception as error:  # whatever the learner's code raises
        return not_yet(f"it raises {type(error).__name__}: {error}")
    if not found:
        return blank("The function still returns nothing: finish its last line.")
    if "loss" not in found:
        return not_yet("one number with its graph is wanted: no list, no .item(), no .detach()")
    if torch.isclose(found["loss"] * TOKENS, expected["loss"], rtol=1e-3):
        return not_yet("that is the mean; the sum is wanted")
    for name, theirs in expected.items():
        if name not in found or not torch.allclose(found[name], theirs, rtol=1e-4, atol=1e-5):
            return not_yet(f"{name} is not that of the whole loss; is every token summed once?")
    if held > 0.9 * whole:
        return not_yet("equal, but all logits exist at once: cut hidden and labels into num_chunks")
    if held > 0.25 * whole:
        return not_yet(
            f"equal, but {held / whole:.0%} of the logits' bytes are held at once: what a chunk "
            f"keeps for its backward pass adds up. Compute it again instead: "
            f"torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
        )
    return right(f"{held / whole:.0%} of the logits' bytes, for one matrix product more.")


def _whole_loss(hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


class _Head(nn.Module):
    """The end of a model: only what the loss needs, so that the tracker can watch it."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.linspace(-1, 1, VOCAB * HIDDEN).view(VOCAB, HIDDEN))
        self.loss = loss

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        return self.loss(hidden, self.lm_head.weight, labels, CHUNKS)


def _run(loss: Callable[..., Any], hidden: Tensor, labels: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Most bytes of logits held; loss and gradients by name, empty where it returns nothing."""
    head = _Head(loss)
    hidden = hidden.clone().requires_grad_()
    with MemoryTracker(head, torch.optim.SGD(head.parameters(), lr=0.1)) as memory:
        total = head(hidden, labels)
        if is_blank(total):
            return 0, {}
        if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
            return 0, {"no loss": hidden}
        torch.autograd.backward(total)
    results = {
        "loss": total.detach(),
        "gradient of hidden": hidden.grad,
        "gradient of weight": head.lm_head.weight.grad,
    }
    found = {name: tensor for name, tensor in results.items() if tensor is not None}
    return memory.timeline().largest("logits"), found
