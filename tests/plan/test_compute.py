"""FLOPs are those that PyTorch counts in a real model, and the figures of PaLM's paper."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labsupport.config import ModelConfig, Recompute
from labsupport.model import Llama
from labsupport.parallel.activation_checkpointing import checkpoint_activations
from labsupport.plan import count_params, flops_per_token, hfu, mfu
from labsupport.plan.compute import TokenFlops

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
}
SHAPES = [{}, {"tie_word_embeddings": True}, {"num_layers": 5, "num_kv_heads": 1, "head_dim": 16}]
BATCH, SEQ_LEN = 2, 32


@pytest.mark.parametrize("name", ["tiny", "15m", "125m", "1b", "llama-3.1-8b"])
def test_parameters_add_up_to_those_of_the_model(name):  # E2
    config = ModelConfig.named(name)
    params = count_params(config)
    assert params.total == config.num_params
    with torch.device("meta"):
        model = Llama(config)
    matrices = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    assert params.multiplying == matrices
    assert params.norms == sum(p.numel() for p in model.parameters() if p.ndim == 1)


def whole_square(q, k, v):
    """Attention as two matrix products, which PyTorch's counter counts on a CPU too."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    future = torch.full(scores.shape[-2:], float("-inf")).triu(1)
    return (scores + future).softmax(-1) @ v.repeat_interleave(group, 1)


def counted(config, *, recompute, attend=None):
    """FLOPs per token that PyTorch counts in the forward pass, and in both."""
    model = Llama(config)
    for layer in model.model.layers:
        layer.self_attn.attend = attend or layer.self_attn.attend
    checkpoint_activations(model, recompute)
    ids = torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN) % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        loss = model.loss(ids, ids)
        forward = counter.get_total_flops()
        loss.backward()
    return forward / ids.numel(), counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("change", SHAPES)
@pytest.mark.parametrize("how", ["none", "full", "every-2"])
def test_flops_are_those_that_pytorch_counts(change, how):
    config, recompute = ModelConfig(**BASE | change), Recompute.parse(how)
    flops = flops_per_token(config, seq_len=SEQ_LEN, causal=False, recompute=recompute)
    forward, both = counted(config, recompute=recompute, attend=whole_square)
    assert flops.forward_flops == forward
    assert flops.hardware_flops == both
    assert flops.training_flops == 3 * forward


@pytest.mark.parametrize("how", ["none", "selective"])
def test_the_matrices_alone_are_those_that_pytorch_counts(how):
    """Its counter does not know fused attention on a CPU, so what is left is the matrices."""
    config, recompute = ModelConfig(**BASE), Recompute.parse(how)
    flops = flops_per_token(config, seq_len=SEQ_LEN, causal=True, recompute=recompute)
    forward, both = counted(config, recompute=recompute)
    assert flops.matmul_forward_flops == forward
    assert 3 * flops.matmul_forward_flops + flops.recompute_flops == both


def test_llama_8b_by_hand():
    config = ModelConfig.named("llama-3.1-8b")
    block = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336
    matrices = 32 * block + 128_256 * 4096
    square = flops_per_token(config, seq_len=8192, causal=False)
    assert square.training_flops == 6 * matrices + 12 * 32 * 4096 * 8192
    assert square.six_n_flops == 6 * 8_030_261_248
    half = flops_per_token(config, seq_len=8192, causal=True)
    assert half.training_flops == 6 * matrices + 6 * 32 * 4096 * 8192
    assert square.training_flops == pytest.approx(57.9e9, rel=1e-3)


def test_a_tied_head_multiplies_although_it_is_counted_once():
    tied, untied = (ModelConfig(**BASE, tie_word_embeddings=tied) for tied in (True, False))
    assert count_params(tied).total + 131 * 64 == count_params(untied).total
    first, second = (flops_per_token(c, seq_len=8, causal=True) for c in (tied, untied))
    assert first.training_flops == second.training_flops
    assert first.six_n_flops < second.six_n_flops


def test_mfu_of_palm_is_the_published_one():
    """Appendix B: 238.3 thousand tokens/s on 6144 TPU v4 of 275 TFLOP/s are 46.2%."""
    palm = TokenFlops(
        matmul_forward_flops=2 * 540.35e9,
        attention_forward_flops=4 * 118 * 48 * 256 * 2048,
        recompute_flops=1e12,
        six_n_flops=6 * 540.35e9,
    )
    known = {"tokens_per_second": 238_300, "peak_flops_per_s": 6144 * 275e12}
    assert mfu(palm, **known) == pytest.approx(0.462, abs=5e-4)
    assert hfu(palm, **known) > mfu(palm, **known)


def test_an_unknown_peak_gives_unknown():
    flops = flops_per_token(ModelConfig(**BASE), seq_len=8, causal=True)
    assert mfu(flops, tokens_per_second=1.0, peak_flops_per_s=None) is None
    assert hfu(flops, tokens_per_second=1.0, peak_flops_per_s=None) is None
    assert hfu(flops, tokens_per_second=1.0, peak_flops_per_s=1e9) == mfu(
        flops, tokens_per_second=1.0, peak_flops_per_s=1e9
    )
    with pytest.raises(ValueError, match="must be positive, for example"):
        mfu(flops, tokens_per_second=1.0, peak_flops_per_s=0.0)


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"seq_len=4096 must lie in 1…2048 \(max_seq_len\)"):
        flops_per_token(ModelConfig(**BASE), seq_len=4096, causal=True)
