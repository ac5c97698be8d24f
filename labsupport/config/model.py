"""How big is the model, and what is it called in Hugging Face's config.json?

ModelConfig.named("tiny").num_params                    # 1_311_872
ModelConfig.from_hf(json.load(open("config.json")))     # any Llama of transformers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from labsupport.config.rules import at_least, divides, require


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies for long texts (`rope_type: llama3`).

    Wavelengths above original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are kept, those between are blended; original is the length of pretraining.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        require(self.factor >= 1, "factor", self.factor, "must be at least 1", 8.0)
        rule = f"must lie between 0 and high_freq_factor={high}"
        require(0 < low < high, "low_freq_factor", low, rule, high / 4)
        at_least(1, original_max_position_embeddings=self.original_max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama. Names are Hugging Face's, with a `num_` prefix for counts.

    Raises ValueError for a shape that cannot be built, or that transformers would refuse to load.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward network (three matrices: gate, up, down)."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int = None  # type: ignore[assignment]
    """Width of a head; left out (or None): hidden_size / num_heads. Always an int once built."""
    max_seq_len: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    """One matrix as both input embedding and output projection."""

    def __post_init__(self) -> None:
        at_least(1, **{name: getattr(self, name) for name in _COLUMNS[:7]})
        divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)
        divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if vars(self)["head_dim"] is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        at_least(2, head_dim=self.head_dim)
        width, theta, eps = self.head_dim, self.rope_theta, self.rms_norm_eps
        require(width % 2 == 0, "head_dim", width, "must be even (rotary pairs)", width - 1)
        require(theta > 1, "rope_theta", theta, "must exceed 1", 10_000.0)
        require(eps > 0, "rms_norm_eps", eps, "must be positive", 1e-5)

    @classmethod
    def named(cls, name: str) -> Self:
        """The configuration called `name`: tiny, 15m, 125m, 1b or llama-3.1-8b."""
        if name not in _NAMED:
            raise ValueError(f"model {name!r} is unknown; choose one of {', '.join(_NAMED)}")
        row: dict[str, Any] = dict(zip(_COLUMNS, _NAMED[name], strict=True))
        factor = row.pop("rope_factor")
        return cls(**row, rope_scaling=RopeScaling(factor=factor) if factor else None)

    @property
    def num_params(self) -> int:
        """Unique parameters, as in the real model: a tied matrix once, all three of SwiGLU."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        block = attention + feed_forward + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * block + self.hidden_size

    @property
    def kv_cache_elements_per_token(self) -> int:
        """Numbers kept for one token of context: 2 · layers · kv_heads · head_dim (K and V)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def to_hf(self, *, bos_token_id: int = 0, eos_token_id: int = 1) -> dict[str, Any]:
        """The `config.json` of transformers' LlamaForCausalLM, as a dict."""
        special = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        for name, token in special.items():
            rule = f"must lie in the vocabulary of {self.vocab_size}"
            require(0 <= token < self.vocab_size, name, token, rule, self.vocab_size - 1)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **vars(self.rope_scaling)}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{hf: getattr(self, ours) for ours, hf in _HF_NAMES.items()},
            "rope_parameters": rope,
            **_HF_FIXED,
            **special,
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read the dict of a Llama `config.json`, of transformers 5 or older.

        Raises ValueError for what `labsupport.model` does not build (biases, other rotary scaling).
        """
        for key, built in {"model_type": "llama", **_HF_FIXED}.items():
            value = config.get(key, built)
            require(value == built, key, value, "is not built here; train or load another", built)
        missing = [key for key in _HF_NEEDED.values() if key not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}; a Llama config.json has them all")
        older = {"rope_theta": 10_000.0, **config, **(config.get("rope_scaling") or {})}
        rope = {"type": "default", **older, **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope["type"])
        require(kind in ("default", "llama3"), "rope_type", kind, "is not built here", "llama3")
        fields = RopeScaling.__dataclass_fields__
        scaling = RopeScaling(**{key: rope[key] for key in fields}) if kind == "llama3" else None
        sizes = {ours: config[hf] for ours, hf in _HF_NAMES.items() if config.get(hf) is not None}
        given = {"num_kv_heads": config["num_attention_heads"], "rms_norm_eps": 1e-6, **sizes}
        return cls(**given, rope_theta=float(rope["rope_theta"]), rope_scaling=scaling)


_HF_NEEDED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_HF_NAMES = _HF_NEEDED | {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
_HF_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

# tiny: head_dim 32 is the smallest that vLLM serves on a CPU. 125m: the shape of GPT-2 small.
# 1b and llama-3.1-8b: the config.json of meta-llama/Llama-3.2-1B and Llama-3.1-8B.
# fmt: off
_COLUMNS = ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "max_seq_len", "tie_word_embeddings", "rope_theta", "rope_factor"]
_NAMED: dict[str, tuple[Any, ...]] = {
    "tiny":         (2048,    128,  384,    4,  4,  2,  2048,    False, 1e4, None),
    "15m":          (2048,    512,  1536,   4,  8,  4,  2048,    False, 1e4, None),
    "125m":         (50_304,  768,  2048,   12, 12, 12, 2048,    True,  1e4, None),
    "1b":           (128_256, 2048, 8192,   16, 32, 8,  131_072, True,  5e5, 32.0),
    "llama-3.1-8b": (128_256, 4096, 14_336, 32, 32, 8,  131_072, False, 5e5, 8.0),
}
# fmt: on
