"""What do the ranks of a tensor-parallel Llama say to each other, and what does each of them hold?

    norm ─ f ─► q k v ─► attention ─► o ─ g ─► + ─► norm ─ f ─► gate up ─► down ─ g ─► +

    f    forward: nothing        backward: all-reduce       the stream is copied to all ranks
    g    forward: all-reduce     backward: nothing          parts of a sum become the sum
         4 all-reduces of b·s·h numbers a block and step
    sequence parallel: each of them is a reduce-scatter at one end, an all-gather at the other

    calls = tensor_parallel_calls(
        ModelConfig.named("tiny"), tensor_parallel_size=2, micro_batch_size=8, seq_len=128
    )
    calls.layer_bytes, calls.step_bytes, calls.token_bytes       # 2097152, 9449472, 9228.0

A call counts with its whole tensor, as in `measure.collective_bytes`. Shoeybi et al., 2019
(Megatron-LM, arXiv 1909.08053); Korthikanti et al., 2022 (sequence parallel, arXiv 2205.05198).
How long it takes: `plan.tensor_parallel_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from labsupport.config import ModelConfig, ParallelConfig, Recompute
from labsupport.config.fits import check_fits
from labsupport.config.rules import at_least
from labsupport.plan.activations import BlockActivations
from labsupport.plan.parameter_shapes import shapes_of

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Place = Literal["embedding", "layers", "head", "loss", "norm gradients", "kv gradients"]


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Equal collectives of one step."""

    kind: Kind
    place: Place
    count: int
    size_bytes: int
    """Of one call: what goes into a reduce-scatter, what comes out of an all-gather."""

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.count * self.size_bytes


@dataclass(frozen=True, kw_only=True)
class TensorParallelCalls:
    """Every collective of the forward and backward passes of one step. Label: predicted."""

    calls: tuple[Calls, ...]
    num_layers: int
    num_tokens: int
    """Of the step: micro batches · sequences · length."""

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of one kind of collective."""
        return sum(calls.total_bytes for calls in self.calls if calls.kind == kind)

    def bytes_at(self, place: Place) -> int:
        """Bytes at one place of the model."""
        return sum(calls.total_bytes for calls in self.calls if calls.place == place)

    @property
    def num_calls(self) -> int:
        """Collectives of any kind."""
        return sum(calls.count for calls in self.calls)

    @property
    def layer_bytes(self) -> int:
        """Of one block."""
        return self.bytes_at("layers") // self.num_layers

    @property
    def step_bytes(self) -> int:
        """Of all calls."""
        return sum(calls.total_bytes for calls in self.calls)

    @property
    def token_bytes(self) -> float:
        """Of all calls, for one token."""
        return self.step_bytes / self.num_tokens


def tensor_parallel_calls(
    config: ModelConfig,
    *,
    tensor_parallel_size: int,
    micro_batch_size: int,
    seq_len: int,
    num_micro_batches: int = 1,
    bytes_per_number: int = 4,
    sequence_parallel: bool = False,
    recompute: Recompute = Recompute(),  # noqa: B008  (frozen)
) -> TensorParallelCalls:
    """What `parallel.tensor` sends in a step; `bytes_per_number` of the stream between the blocks.

    The embedding ends in a g, the head begins with an f, and the loss needs three numbers a token
    in fp32: a maximum, a sum, the label's logit. A block that is computed again sends again, but
    not behind its last matrix, where recomputation stops. Left out: the few numbers of the
    gradient's norm. Raises ValueError for what cannot be split (`config.fits`).
    """
    tp, layers = tensor_parallel_size, config.num_layers
    at_least(1, micro_batch_size=micro_batch_size, seq_len=seq_len)
    at_least(1, num_micro_batches=num_micro_batches)
    parallel = ParallelConfig(tensor_parallel_size=tp, sequence_parallel=sequence_parallel)
    check_fits(config, parallel, seq_len=seq_len)
    tokens = micro_batch_size * seq_len
    stream = tokens * config.hidden_size * bytes_per_number  # b·s·h
    found: list[Calls] = []

    def add(kind: Kind, place: Place, count: int, size_bytes: int) -> None:
        if count and tp > 1:
            count *= num_micro_batches
            found.append(Calls(kind=kind, place=place, count=count, size_bytes=size_bytes))

    again = -(-layers // recompute.every) if recompute.mode in ("full", "selective") else 0
    add_again: dict[Place, int] = {"layers": again}
    functions: dict[Place, int] = {"embedding": 1, "layers": 4 * layers, "head": 1}  # f and g
    for place, count in functions.items():
        repeated = add_again.get(place, 0)  # of a block: the g behind o; its two f
        if sequence_parallel:
            add("all_gather", place, count + 2 * repeated, stream)
            add("reduce_scatter", place, count + repeated, stream)
        else:
            add("all_reduce", place, count + repeated, stream)
    add("all_reduce", "loss", 3, 4 * tokens)
    if sequence_parallel:  # each rank's norms have seen its tokens only
        add("all_reduce", "norm gradients", 2 * layers + 1, 4 * config.hidden_size)
    if config.num_kv_heads % tp:  # all hold k and v whole, each has used a head of them
        kv = config.num_kv_heads * config.head_dim * config.hidden_size
        add("all_reduce", "kv gradients", 2 * layers, 4 * kv)
    return TensorParallelCalls(
        calls=tuple(found), num_layers=layers, num_tokens=tokens * num_micro_batches
    )


def local_shapes(
    config: ModelConfig, *, tensor_parallel_size: int, rank: int
) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter that one rank holds, by its name in `model.Llama`.

    q, k, v, gate, up lose rows; o and down columns; embedding and head rows, as torch.chunk cuts
    them where the vocabulary does not divide; norms are whole. With fewer key heads than ranks k
    and v are whole too. Raises ValueError for numbers that cannot be split, and a rank too high.
    """
    tp = tensor_parallel_size
    check_fits(config, ParallelConfig(tensor_parallel_size=tp), seq_len=1)
    if not 0 <= rank < tp:
        raise ValueError(f"{rank=} must lie in 0…{tp - 1}, for example 0")
    whole = ("norm", "k_proj", "v_proj") if config.num_kv_heads % tp else ("norm",)
    shapes = {}
    for param in shapes_of(config):
        layer = param.name.removesuffix(".weight")
        if layer.endswith(whole):
            shapes[param.name] = param.shape
        elif layer.endswith(("o_proj", "down_proj")):
            shapes[param.name] = (param.shape[0], param.shape[1] // tp)
        else:
            rows = param.numel_of_rank(rank, tp) // param.shape[1]
            shapes[param.name] = (rows, param.shape[1])
    return shapes


def local_params(config: ModelConfig, *, tensor_parallel_size: int) -> tuple[int, ...]:
    """Parameters of each rank: num_params / n, and what is whole on all."""
    n = tensor_parallel_size
    ranks = (local_shapes(config, tensor_parallel_size=n, rank=rank) for rank in range(n))
    return tuple(sum(map(prod, shapes.values())) for shapes in ranks)


def split_block_bytes(
    block: BlockActivations, *, tensor_parallel_size: int, sequence_parallel: bool = False
) -> int:
    """What one rank keeps of `block` for the backward pass.

    Attention and feed-forward are split with the heads and features. What the norms read and give
    is whole on every rank, or split by tokens; the gathered inputs of the matrices are whole.
    """
    split = block.attention_bytes + block.feed_forward_bytes
    stream = block.streams_bytes + block.norms_bytes + block.dropout_bytes
    whole = block.matrix_inputs_bytes + block.rotary_bytes
    if sequence_parallel:
        return whole + (split + stream) // tensor_parallel_size
    return whole + stream + split // tensor_parallel_size
