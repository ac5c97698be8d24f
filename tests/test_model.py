"""The model equals transformers' Llama: names, logits, gradients; and the proof can fail."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from labsupport import model as model_module
from labsupport.config import IGNORE_INDEX, ModelConfig, RopeScaling
from labsupport.model import Llama

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 256,
}
SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 131},
    "odd vocabulary, tied": {"vocab_size": 131, "tie_word_embeddings": True},
    "explicit head_dim": {"head_dim": 32},
    "rope_theta 500000": {"rope_theta": 500_000.0},
    "all at once": {
        "vocab_size": 131,
        "head_dim": 24,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    },
    "no grouping": {"num_kv_heads": 4},
    "one kv head": {"num_kv_heads": 1},
    "llama 3.1 rope": {
        "rope_theta": 500_000.0,
        "rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=64),
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and a busy machine makes them wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pair(**change):
    """The same weights in both; norms and matrices are far from their start, so that all count."""
    config = ModelConfig(**BASE | change)
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(LlamaConfig(**config.to_hf(), attn_implementation="eager")).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.copy_(
                torch.randn_like(param) * (0.3 if param.ndim == 1 else 0.08) + (param.ndim == 1)
            )
    return Llama.from_hf_state_dict(config, theirs.state_dict()), theirs


def ids(vocab_size, *, batch=2, seq=48, seed=0):
    return torch.randint(vocab_size, (batch, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_transformers(shape):
    ours, theirs = pair(**SHAPES[shape])
    tokens = ids(ours.config.vocab_size, seq=49)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 20:] = IGNORE_INDEX

    logits = theirs(input_ids=inputs, use_cache=False).logits
    assert (ours(inputs) - logits).abs().max() < 1e-5
    assert logits.abs().max() > 0.5  # there is something to compare

    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    mine = ours.loss(inputs, labels)
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), abs=1e-6)
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, param in ours.named_parameters():
        assert (param.grad - gradients[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_transformers_names_both_ways(tied):
    ours, theirs = pair(tie_word_embeddings=tied)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())  # strict: none missing, none unexpected
    if tied:
        assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_a_tied_checkpoint_may_leave_out_the_head():
    ours, theirs = pair(tie_word_embeddings=True)
    weights = {k: v for k, v in theirs.state_dict().items() if k != "lm_head.weight"}
    again = Llama.from_hf_state_dict(ours.config, weights)
    assert torch.equal(again(ids(128)), ours(ids(128)))
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        Llama.from_hf_state_dict(ModelConfig(**BASE), weights)


BREAKS = {
    "rotary pairs interleaved": ("rotate", lambda x, rotary: x),
    "query heads grouped the other way": (
        "causal_attention",
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True
        ),
    ),
    "looks ahead": (
        "causal_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_the_proof_of_equality_can_fail(broken, monkeypatch):
    monkeypatch.setattr(model_module, *BREAKS[broken])
    with pytest.raises(AssertionError):
        test_logits_and_gradients_equal_transformers("plain")


@pytest.mark.parametrize("name", ["tiny", "15m"])
def test_num_params_is_what_the_model_has(name):
    config = ModelConfig.named(name)
    with torch.device("meta"):
        model = Llama(config)
    assert sum(param.numel() for param in model.parameters()) == config.num_params


def test_big_models_can_be_counted_without_memory():
    with torch.device("meta"):
        model = Llama(ModelConfig.named("llama-3.1-8b"))
    assert sum(param.numel() for param in model.parameters()) == 8_030_261_248


def test_weights_follow_from_the_seed_alone():
    config = ModelConfig(**BASE)
    torch.manual_seed(1)
    first = Llama(config, seed=3).state_dict()
    torch.manual_seed(2)
    second, other = Llama(config, seed=3).state_dict(), Llama(config, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_an_untrained_model_guesses_evenly():
    config = ModelConfig.named("tiny")
    tokens = ids(config.vocab_size, seq=65)
    loss = Llama(config).loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.3)


def test_sums_and_counts_add_up_over_micro_batches():  # T8
    model = Llama(ModelConfig(**BASE))
    inputs, labels = ids(128, batch=4), ids(128, batch=4, seed=1)
    labels[0, 5:] = IGNORE_INDEX
    labels[3] = IGNORE_INDEX
    whole = model.token_loss(inputs, labels)
    parts = [model.token_loss(inputs[i : i + 1], labels[i : i + 1]) for i in range(4)]
    assert whole.num_tokens == sum(part.num_tokens for part in parts) == 5 + 48 + 48
    assert whole.sum.item() == pytest.approx(sum(part.sum.item() for part in parts), rel=1e-6)
    mean_of_means = sum(part.mean.item() for part in parts) / 4
    assert abs(mean_of_means - whole.mean.item()) > 0.1


def test_no_valid_token_gives_zero_not_nan():
    model = Llama(ModelConfig(**BASE))
    loss = model.loss(ids(128), torch.full((2, 48), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert all(param.grad.abs().max() == 0 for param in model.parameters())


def test_positions_say_where_the_tokens_stand():
    """Rotary attention sees distances only: a shift of all positions changes nothing."""
    model = Llama(ModelConfig(**BASE)).double()
    tokens = ids(128, seq=16)
    shifted = model(tokens, positions=torch.arange(100, 116))
    assert (model(tokens) - shifted).abs().max() < 1e-5
    stretched = model(tokens, positions=torch.arange(16) * 7)
    assert (model(tokens) - stretched).abs().max() > 1e-4


def test_the_future_does_not_change_the_past():
    model, _ = pair()
    tokens = ids(128)
    changed = tokens.clone()
    changed[:, 30:] = 0
    assert (model(tokens)[:, :30] - model(changed)[:, :30]).abs().max() < 1e-6


def test_attention_can_be_replaced_without_an_edit():
    model, _ = pair()
    expected = model(ids(128))
    for block in model.model.layers:
        block.self_attn.attend = lambda q, k, v: model_module.causal_attention(q, k, v)
    assert torch.equal(model(ids(128)), expected)


def test_bf16_weights_work_and_stay_close():
    model, _ = pair()
    expected = model(ids(128))
    actual = model.bfloat16()(ids(128))
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_greedy_generation_equals_transformers():
    ours, theirs = pair()
    prompt = ids(128, batch=1, seq=5)
    expected = theirs.generate(
        prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours.generate(prompt[0].tolist(), max_new_tokens=12) == expected[0].tolist()


def test_sampling_follows_its_seed():
    model, _ = pair()
    a, b, c = (
        model.generate([1, 2], max_new_tokens=10, temperature=1.0, seed=s) for s in (0, 0, 1)
    )
    assert a == b != c
    assert a[:2] == [1, 2]
    assert len(a) == 12


def test_generation_stops_at_eos_and_outlives_the_window():
    model, _ = pair(max_seq_len=8)
    text = model.generate([1, 2, 3], max_new_tokens=20)
    assert len(text) == 23
    assert model.generate([1, 2, 3], max_new_tokens=20, eos_id=text[3]) == text[:4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(ids(128, seq=257)), r"seq in 1…256 \(max_seq_len\), for example \(1, 16\)"),
        (lambda m: m(ids(128)[0]), r"input_ids of shape \(48,\) must be \(batch, seq\)"),
        (lambda m: m.loss(ids(128), ids(128, seq=47)), r"labels of shape \(2, 47\) must match"),
        (lambda m: m.generate([], max_new_tokens=1), "prompt of 0 tokens"),
        (lambda m: m.generate([1], max_new_tokens=1, temperature=-1.0), "temperature=-1.0"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(Llama(ModelConfig(**BASE)))


def test_the_model_learns():
    torch.manual_seed(0)
    model = Llama(ModelConfig(**BASE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pattern = torch.arange(33).repeat(4, 1) * torch.tensor([[1], [2], [3], [4]]) % 128
    losses = []
    for _ in range(25):
        loss = model.loss(pattern[:, :-1], pattern[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
