"""Whatever a model is wrapped in, rank 0 gets the weights of the plain one, by its names."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from labsupport import Ranks
from labsupport.checkpoint import export_hf, full_optimizer_state_dict, full_state_dict, load_hf
from labsupport.config import ModelConfig
from labsupport.corpus import BOS_TOKEN, EOS_TOKEN
from labsupport.data import load_corpus
from labsupport.model import Llama

CONFIG = {
    "vocab_size": 301,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
}
WRAPPED = ["plain", "ddp", "fsdp", "checkpointed", "checkpointed ddp", "checkpointed fsdp", "hand"]


class ByHand(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def build(how, *, tied):
    model = Llama(ModelConfig(**CONFIG, tie_word_embeddings=tied), seed=3)
    if "checkpointed" in how:
        for i, block in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(block)
    if "fsdp" in how:
        for block in model.model.layers:
            fully_shard(block)
        return fully_shard(model)
    if how == "hand":
        return ByHand(model)
    return DistributedDataParallel(model) if "ddp" in how else model


@pytest.fixture(scope="module")
def two():
    with Ranks(2, threads_per_rank=1) as ranks:
        yield ranks


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", WRAPPED)
def test_rank_0_gets_the_plain_weights(two, how, tied):
    first, second = two.run(lambda: full_state_dict(build(how, tied=tied)))
    plain = Llama(ModelConfig(**CONFIG, tie_word_embeddings=tied), seed=3).state_dict()
    assert first.keys() == plain.keys()
    for name, tensor in plain.items():
        assert type(first[name]) is torch.Tensor
        assert torch.equal(first[name], tensor)
    assert second == {}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_every_wrapped_model_can_be_exported(two, how, tmp_path):
    def train_and_export():
        model = build(how, tied=True)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(16)[None]).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, momenta = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            (tmp_path / "own.txt").write_text("The import statement combines operations. " * 50)
            data = load_corpus(tmp_path / "own.txt", vocab_size=300, cache_dir=tmp_path)
            config = ModelConfig(**CONFIG, tie_word_embeddings=True)
            names = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
            export_hf(weights, config, data.tokenizer, tmp_path / "hf", **names)
        return weights, momenta

    (weights, momenta), (_, nothing) = two.run(train_and_export)
    stored = load_hf(tmp_path / "hf").state_dict
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    assert momenta["state"]["model.norm.weight"]["exp_avg"].shape == (16,)
    assert nothing == {}


def test_one_process_needs_no_group_and_a_compiled_model_keeps_its_names():
    model = build("plain", tied=False)
    for wrapped in (model, torch.compile(model, backend="eager")):
        assert full_state_dict(wrapped).keys() == model.state_dict().keys()
