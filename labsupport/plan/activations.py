"""What does one block of a Llama keep for the backward pass, operator by operator?

    stream ─► norm ─► q k v ─► rotary ─► attention ─► o ─► + stream
      h        2h              q + 2kv       q
    stream ─► norm ─► gate, up ─► silu(gate) · up ─► down ─► + stream
      h        2h        2f         f          f

An operator keeps what its derivative needs: a product both factors, a matrix its input. Two that
need the same tensor keep it once. T = batch · seq tokens, h hidden, f intermediate, q and kv the
widths of all query and of all key heads; w bytes for a number of the weights, c of the computation.

    block = block_activations(config, micro_batch_size=4, seq_len=128, recipe=RECIPES["fp32"])
    block.total_bytes / (4 * 128 * config.hidden_size)       # bytes a token and unit of width
    gpt_block_bytes(config, micro_batch_size=4, seq_len=128)  # 34·s·b·h + 5·a·s²·b: not a Llama's
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from labsupport.config import MixedPrecision, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes a number takes, by what it is."""

    parameter_bytes: int
    """Weights that the optimizer changes, their gradients and its moments."""
    compute_bytes: int
    """Results of matrix products, and the residual stream where weights are as narrow."""
    casts: bool
    """Autocast: matrices and their inputs are copied into the compute type."""
    product_bytes: int
    """Inputs of the blocks' matrix products as kept for the backward pass; 1 in fp8."""

    @property
    def stream_bytes(self) -> int:
        """The residual stream and what a norm makes of it: as wide as the weights."""
        return self.parameter_bytes


def _recipe(parameter: int, compute: int, product: int) -> Recipe:
    casts = compute < parameter
    return Recipe(
        parameter_bytes=parameter, compute_bytes=compute, casts=casts, product_bytes=product
    )


RECIPES: dict[MixedPrecision, Recipe] = {
    "fp32": _recipe(4, 4, 4),
    "bf16": _recipe(4, 2, 2),
    "bf16-pure": _recipe(2, 2, 2),
    "fp16": _recipe(4, 2, 2),
    "fp8": _recipe(4, 2, 1),
    "fp8-emulated": _recipe(4, 2, 1),
}


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Bytes that one block keeps for its backward pass, term by term."""

    streams_bytes: int
    """2 T·h·4: what each of the two norms reads, in fp32."""
    norms_bytes: int
    """2 (T·h·w + T·4): the normalised stream, as wide as the weights, and one 1/√ a token."""
    matrix_inputs_bytes: int
    """2 T·h·4 in fp32: a norm's result, shared by q, k, v or by gate, up. Under autocast 5 T·h·2:
    each matrix casts it for itself. (o and down read what attention and SwiGLU keep anyway; in fp8
    they keep a copy of one byte a number.)"""
    rotary_bytes: int
    """4 s·head_dim·c: cosines, sines, cast for q and for k; 0 in fp32, where blocks share them."""
    attention_bytes: int
    """T·(q + kv + kv + q)·c + T·heads·4: q, k, v, the result, and a log-sum a query. Never s²."""
    feed_forward_bytes: int
    """4 T·f·c: gate, silu(gate), up, and their product (in fp8 the last is kept as one byte)."""
    dropout_bytes: int
    """2 T·h·m, when there is dropout: a mask a sublayer; m is 1 on a GPU, c on a CPU."""

    @property
    def total_bytes(self) -> int:
        """All terms."""
        return sum(getattr(self, field.name) for field in fields(self))


def block_activations(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    recipe: Recipe,
    dropout: bool = False,
    on_gpu: bool = False,
) -> BlockActivations:
    """Kept by a block of labsupport.model that recomputes nothing, with fused attention."""
    tokens, hidden, width = micro_batch_size * seq_len, config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    compute, product = recipe.compute_bytes, recipe.product_bytes
    mask = (1 if on_gpu else compute) if dropout else 0
    copies = query + width if product < compute else 0  # o and down, in fp8
    return BlockActivations(
        streams_bytes=2 * tokens * hidden * 4,
        norms_bytes=2 * tokens * (hidden * recipe.stream_bytes + 4),
        matrix_inputs_bytes=tokens * ((5 if recipe.casts else 2) * hidden + copies) * product,
        rotary_bytes=4 * seq_len * config.head_dim * compute if compute < 4 else 0,
        attention_bytes=tokens * ((2 * query + 2 * key) * compute + config.num_heads * 4),
        feed_forward_bytes=(3 if copies else 4) * tokens * width * compute,
        dropout_bytes=2 * tokens * hidden * mask,
    )


def selective_bytes(config: ModelConfig, *, tokens: int, recipe: Recipe) -> int:
    """Kept by a block that recomputes all but its matrix products and attention.

    T·h·w for its input, T·(q + 2kv + q + h + 2f + h)·c for their results, and the log-sums.
    """
    hidden = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    results = 2 * query + 2 * key + 2 * hidden + 2 * config.intermediate_size
    inputs = hidden * recipe.stream_bytes
    return tokens * (inputs + results * recipe.compute_bytes + config.num_heads * 4)


def gpt_block_bytes(config: ModelConfig, *, micro_batch_size: int, seq_len: int) -> int:
    """34·s·b·h + 5·a·s²·b of Korthikanti et al. (2022): a GPT-2 block, all 16-bit, with dropout.

    It has f = 4h, LayerNorm, GELU, as many key as query heads, and keeps the attention scores. None
    of that is so in a Llama with fused attention.
    """
    tokens = micro_batch_size * seq_len
    return tokens * (34 * config.hidden_size + 5 * config.num_heads * seq_len)
