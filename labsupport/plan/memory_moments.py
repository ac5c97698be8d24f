"""At which moments can a training step be fullest, and what is held there?

    forward     all blocks and the logits done; autocast still holds its copies
    loss        log-probabilities, their gradient and that of the logits: three times T·V·4
    head        gradient of the last matrix
    block K     backward at the product inside SwiGLU: three gradients of T·f at once
    embedding   all gradients, and that of the stream
    update      all gradients, and the optimizer's state

Going backward, a block's activations are freed and its gradients arrive. Where a block keeps more
than its gradients take, "loss" or the last block is the peak; with few tokens it is the update.
Names as in plan.memory, whose functions call this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labsupport.config import ModelConfig, Recompute
from labsupport.plan.activations import BlockActivations, Recipe, selective_bytes
from labsupport.plan.compute import count_params


@dataclass(frozen=True)
class Moment:
    """What is held at one point of the step."""

    name: str
    """forward, loss, head, block K, embedding, update."""
    bytes_of: Mapping[str, int]
    """Category -> bytes, named as in measure.memory_timeline; nothing is left out."""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.bytes_of.values())


@dataclass(frozen=True, kw_only=True)
class StepInBytes:
    """The sizes of which all moments are made. T tokens, h hidden, f intermediate, V vocabulary."""

    config: ModelConfig
    tokens: int
    seq_len: int
    recipe: Recipe
    block: BlockActivations
    recompute: Recompute
    gradients_stay: bool
    """Those of earlier micro batches, or DDP's buckets: new ones come one at a time beside them."""
    always: Mapping[str, int]

    @property
    def stream_bytes(self) -> int:
        """T·h·w: the stream between two blocks, and its gradient."""
        return self.tokens * self.config.hidden_size * self.recipe.stream_bytes

    @property
    def logits_bytes(self) -> int:
        """T·V·4: the loss is computed in fp32."""
        return self.tokens * self.config.vocab_size * 4

    @property
    def ends_bytes(self) -> int:
        """T·h·(4 + w + c) + T·4 of the last norm and the head, and the rotary tables."""
        numbers = 4 + self.recipe.stream_bytes + self.recipe.compute_bytes
        return self.tokens * (self.config.hidden_size * numbers + 4) + self.tables_bytes

    @property
    def tables_bytes(self) -> int:
        """2 s·head_dim·4: in fp32 all blocks keep the same tables, a recomputing one needs them."""
        needed = self.recipe.compute_bytes == 4 or self._recomputes(0)
        return 2 * self.seq_len * self.config.head_dim * 4 if needed else 0

    @property
    def matrices(self) -> int:
        """Numbers in the matrices of one block."""
        return count_params(self.config).block_matrices // self.config.num_layers

    @property
    def head(self) -> int:
        """Numbers in the last matrix, V·h."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def head_copy_bytes(self) -> int:
        """Of the last matrix, under autocast."""
        return self.head * self.recipe.compute_bytes if self.recipe.casts else 0

    def copies(self, num_blocks: int) -> int:
        """Of the first blocks' matrices, held for the backward pass by blocks that keep all."""
        return self._block_copy_bytes * sum(not self._recomputes(k) for k in range(num_blocks))

    def kept(self, num_blocks: int) -> int:
        """Activations that the first blocks keep."""
        return sum(self._kept_by(k) for k in range(num_blocks))

    @property
    def _block_copy_bytes(self) -> int:
        return self.matrices * self.recipe.product_bytes if self.recipe.casts else 0

    def _recomputes(self, index: int) -> bool:
        mode, every = self.recompute.mode, self.recompute.every
        return mode == "selective" or (mode == "full" and index % every == 0)

    def _kept_by(self, index: int) -> int:
        if self.recompute.mode == "offload":
            return 0
        if not self._recomputes(index):
            return self.block.total_bytes
        if self.recompute.mode == "full":
            return self.stream_bytes
        return selective_bytes(self.config, tokens=self.tokens, recipe=self.recipe)

    # ---- the moments ---------------------------------------------------------------------------

    def moments(self, *, optimizer_bytes: int, updated_bytes: int) -> tuple[Moment, ...]:
        """In the order of the step; the optimizer's state grows only in the update."""
        layers = self.config.num_layers
        found = [self._forward(), self._loss(), self._head()]
        found += [self._block(index) for index in reversed(range(layers))]
        found += [self._embedding()]
        before = {**self.always, "optimizer": optimizer_bytes}
        update = {**self.always, "optimizer": updated_bytes, "gradients": self._gradients(0)}
        moments = [Moment(name, MappingProxyType({**before, **held})) for name, held in found]
        return (*moments, Moment("update", MappingProxyType(update)))

    def _gradients(self, missing: int) -> int:
        """Of all parameters but `missing`; all of them where earlier micro batches left theirs."""
        present = self.config.num_params - (0 if self.gradients_stay else missing)
        return present * self.recipe.parameter_bytes

    def _in_flight(self, numbers: int) -> int:
        """A gradient that will be added to an earlier one."""
        return numbers * self.recipe.parameter_bytes if self.gradients_stay else 0

    def _all_kept(self) -> dict[str, int]:
        layers = self.config.num_layers
        return {
            "gradients": self._gradients(self.config.num_params),
            "copies": self.copies(layers) + self.head_copy_bytes,
            "activations": self.kept(layers) + self.ends_bytes,
        }

    def _forward(self) -> tuple[str, dict[str, int]]:
        narrow = self.logits_bytes * self.recipe.compute_bytes // 4
        all_copies = self._block_copy_bytes * self.config.num_layers + self.head_copy_bytes
        return "forward", {**self._all_kept(), "copies": all_copies, "logits": narrow}

    def _loss(self) -> tuple[str, dict[str, int]]:
        return "loss", {**self._all_kept(), "logits": 3 * self.logits_bytes}

    def _head(self) -> tuple[str, dict[str, int]]:
        """Its gradient; under autocast made narrow first, then cast."""
        held, arrived = self._all_kept(), self._head_gradient()
        if self.recipe.casts:
            held["copies"] -= self.head_copy_bytes
            held["temporary"] = self.head_copy_bytes + self.stream_bytes
        else:
            held["logits"] = self.logits_bytes * self.recipe.compute_bytes // 4
            held["temporary"] = self.stream_bytes
        return "head", held | {
            "gradients": held["gradients"] + arrived["gradients"],
            "temporary": held["temporary"] + arrived["temporary"] + self._in_flight(self.head),
        }

    def _head_gradient(self) -> dict[str, int]:
        """A tied matrix waits for its other gradient, from the embedding."""
        arrived = 0 if self.gradients_stay else self.head * self.recipe.parameter_bytes
        tied = self.config.tie_word_embeddings
        return {"gradients": 0 if tied else arrived, "temporary": arrived if tied else 0}

    def _block(self, index: int) -> tuple[str, dict[str, int]]:
        config = self.config
        product = self.tokens * config.intermediate_size * self.recipe.compute_bytes
        down = config.intermediate_size * config.hidden_size
        down_copy = down * self.recipe.product_bytes if self.recipe.casts else 0
        missing = (index + 1) * (self.matrices + 2 * config.hidden_size) - down + self.head
        return f"block {index + 1}", {
            "gradients": self._gradients(missing),
            "copies": self.copies(index) + self._block_copy_bytes - down_copy,
            "activations": self.kept(index) + self._whole(index) - product + self.tables_bytes,
            "temporary": self.stream_bytes
            + 3 * product
            + self._head_gradient()["temporary"]
            + self._in_flight(down),
        }

    def _whole(self, index: int) -> int:
        """All that a block keeps, computed again if need be, and what that started from."""
        started_from = 0
        if self._recomputes(index):
            # The stream is the norm's own input, except where the norm reads a wider copy of it.
            started_from += self.stream_bytes if self.recipe.stream_bytes < 4 else 0
            asked_for = self.block.dropout_bytes  # a mask comes after the last product
            if self.recompute.mode == "selective" and not asked_for:
                started_from += self.tokens * self.config.hidden_size * self.recipe.compute_bytes
        return self.block.total_bytes + started_from

    def _embedding(self) -> tuple[str, dict[str, int]]:
        """Its gradient; a tied matrix has two, and their sum."""
        one = self.head * self.recipe.parameter_bytes
        at_once = max(self.stream_bytes + one, 2 * one)
        held = at_once if self.config.tie_word_embeddings else self.stream_bytes
        return "embedding", {
            "gradients": self._gradients(0),
            "temporary": held + self._in_flight(self.head),
        }
