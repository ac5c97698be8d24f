"""What is a Llama? Every block adds two corrections to a stream of vectors, one per token.

    h = h + Attention(RMSNorm(h))        tokens look back at earlier tokens
    h = h + SwiGLU(RMSNorm(h))           every token thinks for itself
    logits = RMSNorm(h) · Wᵀ             one score per entry of the vocabulary

    model = Llama(ModelConfig.named("tiny"), seed=0)
    model(input_ids)                     # (batch, seq) -> logits (batch, seq, vocab)
    model.loss(input_ids, labels)        # mean over the valid tokens, ready for backward()

Parameters are named as in transformers' LlamaForCausalLM. The model knows nothing of ranks, but it
reads the number of heads off its own projections, and `SelfAttention.attend` can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labsupport.config import IGNORE_INDEX, ModelConfig

Rotary = tuple[Tensor, Tensor]


class TokenLoss(NamedTuple):
    """Loss of a batch as two scalars that may be added over micro batches and ranks."""

    sum: Tensor
    """Summed cross-entropy in nats, fp32."""
    num_tokens: Tensor
    """Labels counted (not IGNORE_INDEX), int64."""

    @property
    def mean(self) -> Tensor:
        """Loss per valid token; 0 when there is none."""
        return self.sum / self.num_tokens.clamp(min=1)


def token_loss(logits: Tensor, labels: Tensor) -> TokenLoss:
    """Summed loss and count of valid tokens, of logits (batch, seq, vocab), labels (batch, seq).

    `labels[:, i]` is the token after `input_ids[:, i]` (transformers shifts inside, this does not);
    where it is IGNORE_INDEX the token is left out. To get the gradient of the mean over a *global*
    batch, add the counts of all ranks first and divide the sums by that.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} must match the logits' {tuple(logits.shape)}, "
            f"for example {tuple(logits.shape[:-1])}"
        )
    total = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return TokenLoss(sum=total, num_tokens=(labels != IGNORE_INDEX).sum())


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_frequencies(config: ModelConfig, *, device: torch.device) -> Tensor:
    """Radians per position of each pair of a head: theta^(-2i / head_dim). (head_dim / 2,), fp32.

    With `rope_scaling` the slow ones are stretched (transformers' `_compute_llama3_parameters`).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freq = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretch fully, 1: leave alone
    return (1 - keep) * freq / scaling.factor + keep * freq


def rotary_tables(config: ModelConfig, positions: Tensor) -> Rotary:
    """Cosines and sines of `positions` (seq,), each (seq, head_dim), fp32."""
    angle = torch.outer(positions.float(), rotary_frequencies(config, device=positions.device))
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (i, i + head_dim/2) by its position's angle. (batch, heads, seq, head_dim)."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √head_dim) v over earlier tokens; q (batch, heads, seq, head_dim).

    k and v may have fewer heads: each then serves a group of query heads (GQA).
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al., 2023; Su et al., 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q = rotate(self._split_heads(self.q_proj(x)), rotary)  # (batch, heads, seq, head_dim)
        k = rotate(self._split_heads(self.k_proj(x)), rotary)  # (batch, kv_heads, seq, head_dim)
        v = self._split_heads(self.v_proj(x))
        mixed = self.attend(q, k, v).transpose(1, 2).flatten(2)  # (batch, seq, heads · head_dim)
        out: Tensor = self.o_proj(mixed)
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): a feed-forward network of three matrices (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the stream (batch, seq, hidden)."""

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, h: Tensor, rotary: Rotary) -> Tensor:
        h = h + self.dropout(self.self_attn(self.input_layernorm(h), rotary))
        out: Tensor = h + self.dropout(self.mlp(self.post_attention_layernorm(h)))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, last norm: token ids (batch, seq) -> (batch, seq, hidden)."""

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, dropout=dropout) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        h = self.embed_tokens(input_ids)  # (batch, seq, hidden)
        rotary = rotary_tables(self.config, positions)  # 2 × (seq, head_dim)
        for layer in self.layers:
            h = layer(h, rotary)
        out: Tensor = self.norm(h)
        return out


class Llama(nn.Module):
    """A causal language model with weights drawn from `seed`, the same on every machine.

    Built under `torch.device("meta")` it only counts; call `init_weights` once it has memory.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout=dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if not self.lm_head.weight.is_meta:
            self.init_weights(seed=seed)

    @torch.no_grad()
    def init_weights(self, *, seed: int, put: Callable[..., object] = Tensor.copy_) -> None:
        """Normal weights of spread √(2 / 5·hidden), and 1 / √(2·layers) of that for o and down.

        Nguyen and Salazar's "small init" (2019), and GPT-2's for what is added to the stream. One
        whole parameter after the other is drawn on the CPU and `put(param, weights)` in its place.
        """
        generator = torch.Generator().manual_seed(seed)
        spread = math.sqrt(2 / (5 * self.config.hidden_size))
        for name, param in self.named_parameters():
            adds_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = spread / math.sqrt(2 * self.config.num_layers) if adds_to_stream else spread
            if param.ndim == 1:
                put(param, torch.ones(param.shape, device="cpu"))  # the weight of a norm
            else:
                put(param, torch.randn(param.shape, generator=generator, device="cpu").mul_(std))

    def forward(self, input_ids: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Token ids (batch, seq) -> logits (batch, seq, vocab).

        `positions` (seq,) says where the tokens stand in the text; left out: 0, 1, 2, …
        Raises ValueError when the text is longer than `max_seq_len`.
        """
        seq_len = input_ids.shape[-1]
        if input_ids.ndim != 2 or not 1 <= seq_len <= self.config.max_seq_len:
            raise ValueError(
                f"input_ids of shape {tuple(input_ids.shape)} must be (batch, seq) with seq in "
                f"1…{self.config.max_seq_len} (max_seq_len), for example (1, 16)"
            )
        if positions is None:
            positions = torch.arange(seq_len, device=input_ids.device)
        logits: Tensor = self.lm_head(self.model(input_ids, positions))
        return logits

    def token_loss(self, input_ids: Tensor, labels: Tensor) -> TokenLoss:
        """`token_loss` of this model's logits; both arguments (batch, seq), int64."""
        return token_loss(self(input_ids), labels)

    def loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the valid tokens of this batch, in nats."""
        return self.token_loss(input_ids, labels).mean

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_id: int | None = None,
    ) -> list[int]:
        """Continue the token ids `prompt`; returns prompt and continuation.

        Temperature 0 takes the likeliest token each time, above 0 draws from softmax(logits / T).
        Stops after `eos_id`. Reads the whole text again for every token: simple, slow on purpose.
        """
        if len(prompt) == 0 or temperature < 0:
            raise ValueError(
                f"prompt of {len(prompt)} tokens and {temperature=}: at least one token and a "
                f"temperature of at least 0 are needed, for example prompt=[0], temperature=0.8"
            )
        device = self.lm_head.weight.device
        generator = torch.Generator().manual_seed(seed)
        ids = list(prompt)
        for _ in range(max_new_tokens):
            seen = torch.tensor([ids[-self.config.max_seq_len :]], device=device)
            logits = self(seen)[0, -1].float().cpu()  # (vocab,)
            ids.append(_choose(logits, temperature=temperature, generator=generator))
            if ids[-1] == eos_id:
                break
        return ids

    @classmethod
    def from_hf_state_dict(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> Self:
        """Build from a LlamaForCausalLM's weights; a tied one may lack `lm_head.weight`.

        Raises RuntimeError for any other name too many or too few.
        """
        weights = dict(weights)
        if config.tie_word_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model = cls(config)
        model.load_state_dict(weights)
        return model


def _choose(logits: Tensor, *, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
