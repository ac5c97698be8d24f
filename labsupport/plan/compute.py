"""How much arithmetic is in one token, and which share of the hardware's peak does it use?

    forward   = 2·N + 4·L·a·s       N: parameters that multiply, a = num_heads·head_dim
    training  = 3 · forward         the backward pass multiplies twice as often: 6·N + 12·L·a·s
    MFU       = tokens/s · training / peak          HFU counts what is computed again, too

    flops = flops_per_token(ModelConfig.named("llama-3.1-8b"), seq_len=8192, causal=False)
    flops.training_flops                            # 57.9e9: 45.0 of matrices, 12.9 of attention
    mfu(flops, tokens_per_second=7_000, peak_flops_per_s=989e12)        # 0.41

A multiplication and an addition are two FLOPs. Norms, rotary, softmax and the loss are left out, as
in the sources: Kaplan et al., 2020 (arXiv 2001.08361, section 2.1: 6N); Chowdhery et al., 2022
(PaLM, arXiv 2204.02311, appendix B: MFU, and 12·L·H·Q·T for attention); Korthikanti et al., 2022
(arXiv 2205.05198, section 5 and appendix A: recomputation, and FLOPs of model and hardware apart).
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.config import ModelConfig, Recompute


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Where the parameters are. Which N a formula means matters most for small models."""

    embedding: int
    """vocab_size · hidden_size: rows are looked up, nothing is multiplied."""
    block_matrices: int
    """Of all blocks: q, k, v, o, gate, up, down."""
    norms: int
    """Of all blocks, and the last one: vectors."""
    head: int
    """vocab_size · hidden_size again; 0 where it is the embedding (tied)."""
    is_tied: bool

    @property
    def total(self) -> int:
        """Unique parameters, as `ModelConfig.num_params`: N of PaLM's 6N."""
        return self.embedding + self.block_matrices + self.norms + self.head

    @property
    def multiplying(self) -> int:
        """Entries of all matrices that a token is multiplied with, a tied head included.

        Kaplan's N leaves the head out; it is a matrix product like any other, so it is in here.
        """
        return self.block_matrices + (self.embedding if self.is_tied else self.head)


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs behind one token, the mean over a sequence."""

    matmul_forward_flops: float
    """2 · multiplying parameters."""
    attention_forward_flops: float
    """q·kᵀ and scores·v over the whole square: 4·L·a·s; under the causal mask half: 2·L·a·s."""
    recompute_flops: float
    """What activation checkpointing computes again in the backward pass."""
    six_n_flops: float
    """6 · all parameters: the usual estimate, without attention and with the embedding."""

    @property
    def forward_flops(self) -> float:
        """Matrices and attention."""
        return self.matmul_forward_flops + self.attention_forward_flops

    @property
    def training_flops(self) -> float:
        """Forward and backward: 3 · forward (Chowdhery: 6N + 12·L·H·Q·T, attention not halved)."""
        return 3 * self.forward_flops

    @property
    def hardware_flops(self) -> float:
        """Training and what is computed again."""
        return self.training_flops + self.recompute_flops


def count_params(config: ModelConfig) -> ParamCount:
    """The parameters of `config`, by what they do; a tied matrix once."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    block = attention + 3 * config.hidden_size * config.intermediate_size
    embedding = config.vocab_size * config.hidden_size
    return ParamCount(
        embedding=embedding,
        block_matrices=config.num_layers * block,
        norms=(2 * config.num_layers + 1) * config.hidden_size,
        head=0 if config.tie_word_embeddings else embedding,
        is_tied=config.tie_word_embeddings,
    )


def flops_per_token(
    config: ModelConfig, *, seq_len: int, causal: bool, recompute: Recompute | None = None
) -> TokenFlops:
    """FLOPs of a token among `seq_len` others; `causal` counts only the half that is not masked.

    Published MFUs count the whole square (causal=False); what a causal kernel has to do is half.
    Raises ValueError for a sequence that the model cannot take.
    """
    if not 1 <= seq_len <= config.max_seq_len:
        raise ValueError(f"{seq_len=} must lie in 1…{config.max_seq_len} (max_seq_len)")
    params = count_params(config)
    width = config.num_heads * config.head_dim
    attention = (2.0 if causal else 4.0) * config.num_layers * width * seq_len
    return TokenFlops(
        matmul_forward_flops=2.0 * params.multiplying,
        attention_forward_flops=attention,
        recompute_flops=_recompute_flops(config, params, attention, recompute or Recompute()),
        six_n_flops=6.0 * params.total,
    )


def mfu(
    flops: TokenFlops, *, tokens_per_second: float, peak_flops_per_s: float | None
) -> float | None:
    """Model FLOPs utilisation: the share of the peak that the model itself needs.

    `peak_flops_per_s` of all devices together; None, an unknown peak, gives None.
    """
    return _share(flops.training_flops * tokens_per_second, peak_flops_per_s)


def hfu(
    flops: TokenFlops, *, tokens_per_second: float, peak_flops_per_s: float | None
) -> float | None:
    """Hardware FLOPs utilisation: as `mfu`, with what is computed again; never below it."""
    return _share(flops.hardware_flops * tokens_per_second, peak_flops_per_s)


def _recompute_flops(
    config: ModelConfig, params: ParamCount, attention: float, recompute: Recompute
) -> float:
    """Of a block checkpointed whole: its forward, without the last matrix.

    PyTorch stops computing again as soon as it has all that the backward pass reads, and the
    result of `down` is not read (with dropout behind it, it is). Selective keeps the results of
    matrices and fused attention; offload computes nothing again.
    """
    if recompute.mode != "full":
        return 0.0
    layers = config.num_layers
    checkpointed = -(-layers // recompute.every)  # the first, and every so many after it
    down = config.hidden_size * config.intermediate_size
    return checkpointed * (2.0 * (params.block_matrices / layers - down) + attention / layers)


def _share(flops_per_s: float, peak_flops_per_s: float | None) -> float | None:
    if peak_flops_per_s is None:
        return None
    if peak_flops_per_s <= 0:
        raise ValueError(f"{peak_flops_per_s=} must be positive, for example 989e12, or None")
    return flops_per_s / peak_flops_per_s
