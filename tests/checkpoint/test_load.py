"""A folder in Hugging Face's format is read, or refused in one line."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labsupport.checkpoint import export_hf, load_hf
from labsupport.config import ModelConfig
from labsupport.corpus import BOS_TOKEN, EOS_TOKEN
from labsupport.data import load_corpus
from labsupport.model import Llama

CONFIG = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    (folder / "own.txt").write_text("The import statement combines two operations. " * 50)
    tokenizer = load_corpus(folder / "own.txt", vocab_size=300, cache_dir=folder).tokenizer
    state = Llama(CONFIG).state_dict()
    names = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    return export_hf(state, CONFIG, tokenizer, folder / "out", **names, max_shard_bytes=30_000)


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "model")


def edit(file, **change):
    content = json.loads(file.read_text()) | change
    kept = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(kept))


def test_weights_of_transformers_are_read(folder):
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG.to_hf())).eval()
    for file in folder.glob("model*"):
        file.unlink()
    theirs.save_pretrained(folder)
    loaded = load_hf(folder)
    ours = Llama.from_hf_state_dict(loaded.config, loaded.state_dict)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    "named",
    [
        {"bos_token": {"content": BOS_TOKEN}, "eos_token": {"content": EOS_TOKEN}},
        {"bos_token": None, "eos_token": None},
    ],
)
def test_special_tokens_are_found(folder, named):
    edit(folder / "tokenizer_config.json", **named)
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", eos_token_id=[config["eos_token_id"], 5])
    loaded = load_hf(folder)
    assert (loaded.bos_token, loaded.eos_token) == (BOS_TOKEN, EOS_TOKEN)
    (folder / "tokenizer_config.json").unlink()
    assert load_hf(folder).eos_token == EOS_TOKEN


def remove(name):
    return lambda folder: next(folder.glob(name)).unlink()


def write(name, content):
    return lambda folder: next(folder.glob(name)).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (remove("config.json"), r"config\.json' is missing"),
        (write("config.json", b"{"), r"config\.json' is no JSON object"),
        (write("config.json", b"[1]"), r"config\.json' is no JSON object"),
        (write("config.json", b"\xff\xfe"), r"config\.json' is no JSON object"),
        (lambda f: edit(f / "config.json", model_type="gpt2"), "model_type='gpt2' is not built"),
        (lambda f: edit(f / "config.json", hidden_size=None), "config lacks hidden_size"),
        (lambda f: edit(f / "config.json", hidden_size="x"), r"config\.json': hidden_size='x'"),
        (lambda f: edit(f / "config.json", vocab_size=290), "ids up to 295, beyond vocab_size=290"),
        (remove("tokenizer.json"), r"tokenizer\.json' is missing"),
        (write("tokenizer.json", b"{}"), r"tokenizer\.json' is damaged"),
        (lambda f: edit(f / "tokenizer_config.json", eos_token="</s>"), "eos_token='</s>' is not"),
        (remove("model-00002*"), r"model-00002-of-.*safetensors' is missing"),
        (write("model-00002*", b"half"), r"model-00002-of-.*safetensors' is damaged"),
        (remove("*.index.json"), r"model\.safetensors' is missing"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)
    assert "name a folder that" in str(caught.value)
