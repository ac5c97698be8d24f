"""Operators by what they keep: a block that can be counted by hand, and the plan's prediction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labsupport.config import ModelConfig
from labsupport.measure.kept import kept_by_operator
from labsupport.model import Block, rotary_tables
from labsupport.plan import training_memory


def test_two_operators_by_hand() -> None:
    linear, x = nn.Linear(8, 4, bias=False), torch.randn(5, 8, requires_grad=True)
    table = kept_by_operator(lambda: linear(x).sin().exp().sum())
    # sin keeps the product, exp its own result; sin's result is read by nobody. 5 x 4 numbers.
    kept = {row.operator: (row.kept_bytes, row.flops) for row in table.rows}
    assert kept == {"exp": (80, 20), "mm": (80, 2 * 5 * 8 * 4), "sin": (0, 20), "sum": (0, 1)}
    assert [row.operator for row in table.rows] == ["exp", "mm", "sin", "sum"]
    assert table.of("mm").flops_per_kept_byte == 4.0
    assert table.of("sin").flops_per_kept_byte is None
    assert repr(table).splitlines()[0].split() == [
        *("operator", "calls", "KiB", "kept", "MFLOP", "FLOP", "a", "byte", "kept")
    ]
    with pytest.raises(ValueError, match="operator='cos' did not run; exp, mm, sin, sum did"):
        table.of("cos")


def test_a_block_keeps_what_the_plan_says() -> None:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
    )
    block, h = Block(config), torch.randn(2, 16, 32, requires_grad=True)
    rotary = rotary_tables(config, torch.arange(16))
    table = kept_by_operator(lambda: block(h, rotary))
    planned = training_memory(config, micro_batch_size=2, seq_len=16).block.total_bytes
    assert table.kept_bytes == planned - h.numel() * 4  # the input was made outside
    matrices = 2 * 32 * 32 * (32 + 16 + 16 + 32 + 3 * 96)
    assert table.of("mm").flops == matrices
    assert table.of("attention").flops == 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert "<td style='text-align:left'>attention</td>" in table._repr_html_()
