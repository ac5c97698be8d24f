"""How many bytes does a training step need, and at which moment is it fullest?

    kept all the time       parameters + optimizer state
    filled in backward      + gradients                        (4 + 4 + 8 bytes a parameter)
    emptied in backward     + activations + logits + copies    (grow with batch and length)

    plan = training_memory(
        ModelConfig.named("1b"), micro_batch_size=1, seq_len=8192, precision="bf16"
    )
    plan.peak.name, plan.peak_bytes, plan.first_peak_bytes     # "loss", 43.8 GiB, 34.6 GiB
    plan.bytes_of                                              # the peak, by category

A step is followed through the moments at which it can be fullest; each is a sum of named terms.
Meant: labsupport.model and labsupport.train.train_step, a fused optimizer, fused attention, no
torch.compile. Bytes are those of tensors, as measure.memory counts them: an allocator rounds them
up and keeps more. GiB is 2^30 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labsupport.config import MixedPrecision, ModelConfig, Optimizer, Recompute
from labsupport.plan.activations import RECIPES, BlockActivations, block_activations
from labsupport.plan.memory_moments import Moment, StepInBytes


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of a training step on one device. Label: predicted, from the configuration alone."""

    num_params: int
    parameters_bytes: int
    """num_params · 4, or 2 in pure bf16."""
    gradients_bytes: int
    """As the parameters; from the backward pass to zero_grad, in DDP's buckets all the time."""
    optimizer_bytes: int
    """adamw: two moments as wide as the parameters, and 4 bytes a tensor for its count of steps;
    sgd: one if it has momentum, else nothing. There from the end of the first step."""
    copies_bytes: int
    """Of the matrices, in the compute type, kept from forward to backward pass (autocast)."""
    activations_bytes: int
    """Kept between forward and backward pass, without logits: `num_layers` blocks and both ends."""
    logits_bytes: int
    """T·V·4 of the same: log-probabilities in fp32."""
    logits_peak_bytes: int
    """3 T·V·4 at the start of the backward pass: log-probabilities, their gradient, the logits'."""
    inputs_bytes: int
    """Token ids and labels, 8 bytes each."""
    offloaded_bytes: int
    """Activations in host memory; they are not part of any sum here."""
    block: BlockActivations
    """What a block that recomputes nothing keeps, term by term."""
    first_moments: tuple[Moment, ...]
    """Of the first step, in which the optimizer's state does not exist until the update."""
    moments: tuple[Moment, ...]
    """Of every later step."""

    @property
    def first_peak(self) -> Moment:
        """The fullest moment of the first step."""
        return max(self.first_moments, key=lambda moment: moment.total_bytes)

    @property
    def peak(self) -> Moment:
        """The fullest moment of all later steps."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def first_peak_bytes(self) -> int:
        """Bytes at `first_peak`."""
        return self.first_peak.total_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes at `peak`: what the device must have, and somewhat more."""
        return self.peak.total_bytes

    @property
    def bytes_of(self) -> Mapping[str, int]:
        """The peak by category."""
        return self.peak.bytes_of

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer: they do not depend on the batch."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def training_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    precision: MixedPrecision = "fp32",
    optimizer: Optimizer = "adamw",
    momentum: float = 0.9,
    recompute: Recompute = Recompute(),  # noqa: B008  (frozen)
    gradient_accumulation_steps: int = 1,
    dropout: float = 0.0,
    data_parallel: bool = False,
    on_gpu: bool = False,
) -> TrainingMemory:
    """Predict the memory of training `config` with micro batches of `micro_batch_size` · `seq_len`.

    With `data_parallel` the gradients live in DDP's buckets, which stay from step to step. Raises
    ValueError for sizes below 1 and an unknown precision.
    """
    sizes = (micro_batch_size, seq_len, gradient_accumulation_steps)
    if min(sizes) < 1:
        raise ValueError(
            f"{micro_batch_size=}, {seq_len=} and {gradient_accumulation_steps=} must all be at "
            f"least 1, for example 8, 128 and 1"
        )
    if precision not in RECIPES:
        raise ValueError(f"{precision=} is unknown; choose one of {', '.join(RECIPES)}")
    recipe, tokens = RECIPES[precision], micro_batch_size * seq_len
    block = block_activations(
        config,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        recipe=recipe,
        dropout=dropout > 0,
        on_gpu=on_gpu,
    )
    parameters = config.num_params * recipe.parameter_bytes
    inputs = 2 * 8 * tokens * gradient_accumulation_steps
    state = _optimizer_bytes(config, parameters, optimizer=optimizer, momentum=momentum)
    step = StepInBytes(
        config=config,
        tokens=tokens,
        seq_len=seq_len,
        recipe=recipe,
        block=block,
        recompute=recompute,
        gradients_stay=gradient_accumulation_steps > 1 or data_parallel,
        always={"parameters": parameters, "inputs": inputs},
    )
    return TrainingMemory(
        num_params=config.num_params,
        parameters_bytes=parameters,
        gradients_bytes=parameters,
        optimizer_bytes=state,
        copies_bytes=step.copies(config.num_layers) + step.head_copy_bytes,
        activations_bytes=step.kept(config.num_layers) + step.ends_bytes,
        logits_bytes=step.logits_bytes,
        logits_peak_bytes=3 * step.logits_bytes,
        inputs_bytes=inputs,
        offloaded_bytes=block.total_bytes * config.num_layers if recompute.mode == "offload" else 0,
        block=block,
        first_moments=step.moments(optimizer_bytes=0, updated_bytes=state),
        moments=step.moments(optimizer_bytes=state, updated_bytes=state),
    )


def _optimizer_bytes(
    config: ModelConfig, parameters_bytes: int, *, optimizer: Optimizer, momentum: float
) -> int:
    if optimizer == "sgd":
        return parameters_bytes if momentum else 0
    num_tensors = 9 * config.num_layers + (2 if config.tie_word_embeddings else 3)
    return 2 * parameters_bytes + 4 * num_tensors
