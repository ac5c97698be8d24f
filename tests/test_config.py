"""Configurations: exact sizes, the same as transformers', and one clear line for a wrong one."""

import re
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labsupport.config import ModelConfig, ParallelConfig, RopeScaling, TrainConfig, check_fits

NAMES = ["tiny", "15m", "125m", "1b", "llama-3.1-8b"]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_num_params_is_the_number_of_unique_parameters_of_the_real_model(name):
    config = ModelConfig.named(name)
    with torch.device("meta"):
        real = LlamaForCausalLM(LlamaConfig(**config.to_hf()))
    assert config.num_params == sum(param.numel() for param in real.parameters())


def test_num_params_matches_the_published_sizes():
    assert ModelConfig.named("1b").num_params == 1_235_814_400  # tied: counted once (E2)
    assert ModelConfig.named("llama-3.1-8b").num_params == 8_030_261_248
    assert 1e6 < ModelConfig.named("tiny").num_params < 3e6
    assert ModelConfig.named("15m").num_params == pytest.approx(15e6, rel=0.05)
    assert ModelConfig.named("125m").num_params == pytest.approx(125e6, rel=0.05)


def test_untying_adds_one_matrix():
    tied, untied = (ModelConfig(**SMALL, tie_word_embeddings=tie) for tie in (True, False))
    assert untied.num_params - tied.num_params == 96 * 32


def test_kv_cache_counts_kv_heads_and_the_explicit_head_dim():
    assert (
        ModelConfig.named("llama-3.1-8b").kv_cache_elements_per_token == 65_536
    )  # 128 KiB in bf16
    assert ModelConfig(**SMALL, head_dim=16).kv_cache_elements_per_token == 2 * 2 * 2 * 16  # E1


def test_head_dim_is_derived_or_kept():
    assert ModelConfig(**SMALL).head_dim == 8
    assert ModelConfig(**SMALL, head_dim=32).head_dim == 32


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_round_trip(name):
    config = ModelConfig.named(name)
    written = LlamaConfig(**config.to_hf()).to_dict()
    assert ModelConfig.from_hf(written) == config
    assert written["num_key_value_heads"] == config.num_kv_heads


def test_reads_the_rope_settings_of_older_files():
    old = {k: v for k, v in ModelConfig(**SMALL).to_hf().items() if k != "rope_parameters"}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    read = ModelConfig.from_hf(old | {"rope_theta": 500_000.0, "rope_scaling": scaling})
    assert read.rope_theta == 500_000.0
    assert read.rope_scaling == RopeScaling(factor=8.0)
    assert ModelConfig.from_hf(old | {"rope_scaling": None}).rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not built here"),
        ({"attention_bias": True}, "attention_bias=True is not built here"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": None}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    ],
)
def test_hugging_face_settings_that_are_not_built_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(ModelConfig(**SMALL).to_hf() | change)


def test_missing_hugging_face_keys_are_named():
    with pytest.raises(ValueError, match="config lacks hidden_size, intermediate_size"):
        ModelConfig.from_hf({"vocab_size": 5, "num_hidden_layers": 1, "num_attention_heads": 1})


def test_special_tokens_must_lie_in_the_vocabulary():
    with pytest.raises(ValueError, match=r"eos_token_id=96 must lie in the vocabulary of 96"):
        ModelConfig(**SMALL).to_hf(eos_token_id=96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1, for example 2"),
        ({"vocab_size": 2.5}, "vocab_size=2.5 must be a whole number"),
        ({"num_heads": 5}, "num_heads=5 must divide hidden_size=32, for example 4"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4, for example 2"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"head_dim": 0}, "head_dim=0 must be a whole number of at least 2"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must exceed 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be positive"),
    ],
)
def test_shapes_that_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SMALL | change)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'huge' is unknown; choose one of tiny, 15m, 125m, 1b"):
        ModelConfig.named("huge")


@pytest.mark.parametrize(("factor", "low"), [(0.5, 1.0), (8.0, 5.0), (8.0, 0.0)])
def test_impossible_rope_scaling(factor, low):
    with pytest.raises(ValueError, match="for example"):
        RopeScaling(factor=factor, low_freq_factor=low)


@pytest.mark.parametrize(
    ("sharding", "replicas", "shape"),
    [("ddp", 1, (4, 1)), ("fsdp", 1, (1, 4)), ("zero1", 1, (1, 4)), ("hsdp", 2, (2, 2))],
)
def test_mesh_and_world_size_follow_from_the_degrees(sharding, replicas, shape):
    config = ParallelConfig(
        data_parallel_size=4,
        data_parallel_sharding=sharding,
        data_parallel_replicate_size=replicas,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
    )
    assert config.world_size == 24
    assert list(config.mesh) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert (config.mesh["dp_replicate"], config.mesh["dp_shard"]) == shape


def test_data_parallelism_takes_the_ranks_that_are_left():
    config = ParallelConfig.for_world_size(8, tensor_parallel_size=2)
    assert (config.data_parallel_size, config.world_size) == (4, 8)
    hsdp = {"data_parallel_sharding": "hsdp", "data_parallel_replicate_size": 2}
    assert ParallelConfig.for_world_size(4, **hsdp).mesh["dp_shard"] == 2
    with pytest.raises(ValueError, match=r"world_size=6 must be a multiple of 4 .*, for example 4"):
        ParallelConfig.for_world_size(6, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number"),
        ({"data_parallel_sharding": "zero3"}, "choose one of ddp, zero1, zero2, fsdp, hsdp"),
        ({"pipeline_schedule": "2f2b"}, "choose one of gpipe, 1f1b, interleaved, zb"),
        ({"data_parallel_size": 4, "data_parallel_replicate_size": 2}, "is for hsdp only"),
        ({"data_parallel_size": 4, "data_parallel_replicate_size": 3,
          "data_parallel_sharding": "hsdp"}, "must divide data_parallel_size=4, for example 2"),
        ({"sequence_parallel": True}, "use tensor_parallel_size=2, or leave it out"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**change)


THREES = {**SMALL, "hidden_size": 36, "num_heads": 6, "num_kv_heads": 3}


@pytest.mark.parametrize(
    ("shape", "tp"),
    [
        (SMALL, 2),
        (SMALL, 4),  # two ranks share a key-value head
        ({**SMALL, "vocab_size": 97}, 4),  # the last rank knows fewer words
        (THREES, 3),  # no power of two (claim B13)
        (THREES, 6),
    ],
)
def test_what_divides_fits(shape, tp):
    check_fits(ModelConfig(**shape), ParallelConfig(tensor_parallel_size=tp), seq_len=7)


@pytest.mark.parametrize(
    ("shape", "sizes", "seq_len", "message"),
    [
        (SMALL, {"tensor_parallel_size": 3}, 8,
         "tensor_parallel_size=3 must divide num_heads=4, and num_kv_heads=2 or be a multiple of "
         "it, for example 2"),
        (SMALL, {"tensor_parallel_size": 8}, 8,
         "tensor_parallel_size=8 must divide num_heads=4, for example 4"),
        ({**SMALL, "num_heads": 8}, {"tensor_parallel_size": 8}, 8, None),
        ({**SMALL, "intermediate_size": 50}, {"tensor_parallel_size": 4}, 8,
         "tensor_parallel_size=4 must divide intermediate_size=50, for example 2"),
        ({**THREES, "num_kv_heads": 2}, {"tensor_parallel_size": 3}, 8,
         "must divide num_kv_heads=2 or be a multiple of it, for example 2"),
        ({**SMALL, "vocab_size": 5}, {"tensor_parallel_size": 4}, 8,
         "must divide vocab_size=5 or leave a word to every rank, for example 2"),
        (SMALL, {"context_parallel_size": 2}, 12, None),
        (SMALL, {"context_parallel_size": 2}, 10,
         "seq_len=10 must be a multiple of 4 (2 chunks × 2 context-parallel ranks), for example 8"),
        (SMALL, {"context_parallel_size": 4}, 4, "must be a multiple of 8"),
        (SMALL, {"tensor_parallel_size": 4, "sequence_parallel": True}, 6,
         "seq_len=6 must be a multiple of 4 (4 tensor-parallel ranks split the sequence), for "
         "example 4"),
        (SMALL, {"tensor_parallel_size": 4, "sequence_parallel": True,
                 "context_parallel_size": 3}, 30, "must be a multiple of 12"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_the_numbers(shape, sizes, seq_len, message):
    model, parallel = ModelConfig(**shape), ParallelConfig(**sizes)
    if message is None:
        check_fits(model, parallel, seq_len=seq_len)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_fits(model, parallel, seq_len=seq_len)


def test_global_batch_is_micro_batch_times_accumulation_times_data_parallel_ranks():
    train = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=3)
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=5)
    assert train.global_batch_size(parallel) == 4 * 3 * 2


def test_learning_rate_warms_up_then_falls_on_a_cosine():
    train = TrainConfig(learning_rate=1.0, warmup_steps=4, steps=24, min_learning_rate_ratio=0.2)
    rates = [train.learning_rate_at(step) for step in range(30)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.6)  # half-way
    assert rates[24] == rates[29] == pytest.approx(0.2)
    assert sorted(rates[4:25], reverse=True) == rates[4:25]
    assert TrainConfig(steps=3, warmup_steps=10).learning_rate_at(2) == pytest.approx(3e-3 * 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1"),
        ({"steps": -1}, "steps=-1 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive, for example 0.003"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be positive"),
        ({"optimizer": "lion"}, "choose one of adamw, sgd"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must not be negative"),
        ({"adam_eps": float("inf")}, "adam_eps=inf must be positive"),
        ({"grad_clip": 0.0}, "grad_clip=0.0 must be positive and finite, or None"),
        ({"min_learning_rate_ratio": 2.0}, "must lie in 0…1"),
    ],
)
def test_runs_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_config_and_results_do_not_load_torch():
    code = "import labsupport.config, labsupport.results, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
