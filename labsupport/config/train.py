"""What does one training run do, whatever the number of ranks?

global_batch_size = micro_batch_size × gradient_accumulation_steps × data_parallel_size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from labsupport.config.parallel import ParallelConfig
from labsupport.config.recompute import Recompute
from labsupport.config.rules import at_least, one_of, require

Optimizer = Literal["adamw", "sgd"]
MixedPrecision = Literal["fp32", "bf16", "bf16-pure", "fp16", "fp8", "fp8-emulated"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What one training run does, whatever the number of ranks."""

    micro_batch_size: int = 8
    """Sequences that a data-parallel rank takes through forward and backward at a time."""
    gradient_accumulation_steps: int = 1
    """Micro batches added up before the optimizer steps; under a pipeline its microbatches."""
    seq_len: int = 128
    steps: int = 100
    seed: int = 0
    optimizer: Optimizer = "adamw"
    learning_rate: float = 3e-3
    min_learning_rate_ratio: float = 0.1
    """Where the cosine ends, as a share of learning_rate; 1.0 keeps the rate constant."""
    warmup_steps: int = 20
    """Steps of linear rise from 0; a run shorter than this ends while still warming up."""
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    momentum: float = 0.9
    """sgd only."""
    grad_clip: float | None = 1.0
    """Largest norm of the whole gradient; None leaves it as it is."""
    dropout: float = 0.0
    """Share of each block's output that is set to 0 in training; seeded by step and rank."""
    mixed_precision: MixedPrecision = "fp32"
    activation_checkpointing: str = "none"
    """none, full, selective, offload or every-K; see `Recompute.parse`."""

    def __post_init__(self) -> None:
        counts = ["micro_batch_size", "gradient_accumulation_steps", "seq_len", "steps"]
        at_least(1, **{name: getattr(self, name) for name in counts})
        at_least(0, seed=self.seed, warmup_steps=self.warmup_steps)
        require(self.seed < 2**63, "seed", self.seed, "must be below 2**63", 0)
        one_of("optimizer", self.optimizer, Optimizer)
        rate, floor = self.learning_rate, self.min_learning_rate_ratio
        require(0 < rate < math.inf, "learning_rate", rate, "must be positive", 3e-3)
        require(0 <= floor <= 1, "min_learning_rate_ratio", floor, "must lie in 0…1", 0.1)
        decay, clip = self.weight_decay, self.grad_clip
        rule = "must not be negative or infinite"
        require(0 <= decay < math.inf, "weight_decay", decay, rule, 0.1)
        fine, rule = clip is None or 0 < clip < math.inf, "must be positive and finite, or None"
        require(fine, "grad_clip", clip, rule, 1.0)
        betas, eps, drop, momentum = self.adam_betas, self.adam_eps, self.dropout, self.momentum
        fine = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require(fine, "adam_betas", betas, "must be two numbers in 0…1", (0.9, 0.95))
        require(0 < eps < math.inf, "adam_eps", eps, "must be positive", 1e-8)
        require(0 <= momentum < 1, "momentum", momentum, "must be at least 0 and below 1", 0.9)
        require(0 <= drop < 1, "dropout", drop, "must be at least 0 and below 1", 0.1)
        one_of("mixed_precision", self.mixed_precision, MixedPrecision)
        Recompute.parse(self.activation_checkpointing)

    @property
    def recompute(self) -> Recompute:
        """`activation_checkpointing`, read."""
        return Recompute.parse(self.activation_checkpointing)

    def global_batch_size(self, parallel: ParallelConfig) -> int:
        """Sequences behind one optimizer step: micro batch × accumulation × data parallel."""
        per_rank = self.micro_batch_size * self.gradient_accumulation_steps
        return per_rank * parallel.data_parallel_size

    def learning_rate_at(self, step: int) -> float:
        """Rate of `step` (from 0): linear warm-up, then a cosine to the smallest rate."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / span))) / 2
        floor = self.min_learning_rate_ratio
        return self.learning_rate * (floor + (1 - floor) * cosine)
