"""Which parameters has the model, in which shapes, and which rows of them falls to which rank?

    rows of rank r = from min(rows, r · e) to min(rows, (r + 1) · e)        e = ceil(rows / n)

    shapes = shapes_of(ModelConfig.named("tiny"))
    shapes[0].name, shapes[0].shape                 # "model.embed_tokens.weight", (2048, 128)
    ParameterShape(name="odd", shape=(5, 3)).numel_of_rank(3, 4)      # 0: the last rank has none

As torch.chunk splits, and DTensor's Shard(0): the first ranks have e rows, the last fewer or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labsupport.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    """A frozen one has neither gradient nor optimizer state, and no step changes it."""
    unit: str = ""
    """What is gathered together: "model.layers.0", after the first block in it; "" is the root."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    def numel_of_rank(self, rank: int, num_ranks: int) -> int:
        """Numbers in the rows of `rank`."""
        rows = self.shape[0]
        each = -(-rows // num_ranks)
        mine = min(rows, (rank + 1) * each) - min(rows, rank * each)
        return mine * self.numel // rows

    def padded_numel(self, num_ranks: int) -> int:
        """Numbers that travel: in a collective every piece is as long as the first rank's."""
        return self.numel_of_rank(0, num_ranks) * num_ranks


def shapes_of(config: ModelConfig, *, blocks_per_unit: int = 1) -> tuple[ParameterShape, ...]:
    """The parameters of `model.Llama`, in its order; a tied matrix once, and in the root."""
    if not 1 <= blocks_per_unit <= config.num_layers:
        raise ValueError(f"{blocks_per_unit=} must be in 1…{config.num_layers}, for example 1")
    h, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block = {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    blocks = [
        ParameterShape(
            name=f"model.layers.{i}.{name}.weight",
            shape=shape,
            unit=f"model.layers.{i - i % blocks_per_unit}",
        )
        for i in range(config.num_layers)
        for name, shape in block.items()
    ]
    ends = [ParameterShape(name="model.norm.weight", shape=(h,))]
    if not config.tie_word_embeddings:
        ends.append(ParameterShape(name="lm_head.weight", shape=(v, h)))
    return (ParameterShape(name="model.embed_tokens.weight", shape=(v, h)), *blocks, *ends)
