"""transformers loads what we export: no key missing or left over, the same logits and tokens."""

import json
import logging

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from labsupport.checkpoint import check_export, export_hf, load_hf
from labsupport.checkpoint import export as export_module
from labsupport.config import ModelConfig, RopeScaling
from labsupport.corpus import BOS_TOKEN, EOS_TOKEN
from labsupport.data import load_corpus
from labsupport.model import Llama

NAMES = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 128,
}
SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 307},
    "odd vocabulary, tied": {"vocab_size": 307, "tie_word_embeddings": True},
    "rope_theta 500000": {"rope_theta": 500_000.0, "head_dim": 24},
    "llama 3.1 rope": {
        "rope_theta": 500_000.0,
        "rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=64),
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "own.txt").write_text("The import statement combines two operations. " * 50)
    return load_corpus(folder / "own.txt", vocab_size=300, cache_dir=folder).tokenizer


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(**change):
    """A model far from its start, so that every weight counts."""
    model = Llama(ModelConfig(**BASE | change), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.05)
    return model


def loaded_by_transformers(folder):
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return theirs.eval()


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_transformers_gives_the_same_logits(tokenizer, tmp_path, change):
    model = trained(**change)
    export_hf(model.state_dict(), model.config, tokenizer, tmp_path / "hf", **NAMES)
    theirs = loaded_by_transformers(tmp_path / "hf")
    ids = torch.randint(
        0, model.config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        gap = (theirs(ids).logits - model(ids)).abs().max()
    assert gap < 1e-4
    assert theirs.dtype == torch.float32
    again = load_hf(tmp_path / "hf")
    assert again.config == model.config
    back = Llama.from_hf_state_dict(again.config, again.state_dict).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tied_matrix_is_stored_once(tokenizer, tmp_path):
    model = trained(tie_word_embeddings=True)
    export_hf(model.state_dict(), model.config, tokenizer, tmp_path / "hf", **NAMES)
    stored = load_hf(tmp_path / "hf").state_dict
    assert "lm_head.weight" not in stored
    assert sum(tensor.numel() for tensor in stored.values()) == model.config.num_params
    untied = dict(model.state_dict())
    untied["lm_head.weight"] = untied["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        export_hf(untied, model.config, tokenizer, tmp_path / "hf", **NAMES)


def test_bf16_weights_stay_bf16(tokenizer, tmp_path):
    model = trained()
    for folder, state, dtype in (
        ("kept", model.bfloat16().state_dict(), None),
        ("cast", trained().state_dict(), torch.bfloat16),
    ):
        export_hf(state, model.config, tokenizer, tmp_path / folder, **NAMES, dtype=dtype)
        theirs = loaded_by_transformers(tmp_path / folder)
        assert theirs.dtype == torch.bfloat16
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])


def test_large_models_are_cut_into_files(tokenizer, tmp_path):
    model = trained()
    folder = tmp_path / "hf"
    export_hf(model.state_dict(), model.config, tokenizer, folder, **NAMES, max_shard_bytes=100_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    loaded_by_transformers(folder)
    stored = load_hf(folder).state_dict
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


def test_slices_of_one_buffer_and_matrices_in_common_are_all_stored(tokenizer, tmp_path):
    """A wrapper may keep its parameters in one flat buffer; two names may share one tensor."""
    model = trained()
    state = model.state_dict()
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    pieces = flat.split([tensor.numel() for tensor in state.values()])
    shared = {
        name: piece.view_as(tensor)
        for piece, (name, tensor) in zip(pieces, state.items(), strict=True)
    }
    export_hf(shared, model.config, tokenizer, tmp_path / "hf", **NAMES)
    stored = load_hf(tmp_path / "hf").state_dict
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    same = dict(state) | {"lm_head.weight": state["model.embed_tokens.weight"]}
    export_hf(same, model.config, tokenizer, tmp_path / "hf", **NAMES)
    loaded_by_transformers(tmp_path / "hf")


def test_the_tokenizer_gives_the_same_ids_and_has_a_chat_template(tokenizer, tmp_path):
    model = trained()
    export_hf(model.state_dict(), model.config, tokenizer, tmp_path / "hf", **NAMES)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("The import statement\n    combines", "naïve 你好 🙂  ", f"x{EOS_TOKEN}y"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(tokenizer.encode(text).ids) == tokenizer.decode(
            tokenizer.encode(text).ids, skip_special_tokens=False
        )
    assert theirs.bos_token_id == tokenizer.token_to_id(BOS_TOKEN)
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.token_to_id(EOS_TOKEN)
    assert theirs.model_max_length == 128
    chat = [{"role": "user", "content": "Hello"}]
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS_TOKEN}user: Hello\nassistant:"
    settings = GenerationConfig.from_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for ids in (settings.to_dict(), config):
        assert ids["bos_token_id"] == theirs.bos_token_id < model.config.vocab_size
        assert ids["eos_token_id"] == theirs.eos_token_id < model.config.vocab_size


def test_transformers_generates_and_says_nothing_is_wrong(tokenizer, tmp_path, caplog):
    model = trained()
    export_hf(model.state_dict(), model.config, tokenizer, tmp_path / "hf", **NAMES)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        theirs = loaded_by_transformers(tmp_path / "hf")
        ids = torch.tensor([tokenizer.encode("The import").ids])
        out = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
    eos = tokenizer.token_to_id(EOS_TOKEN)
    assert out == model.generate(ids[0].tolist(), max_new_tokens=8, eos_id=eos)
    assert not caplog.records


def test_an_export_replaces_an_earlier_one_and_nothing_else(tokenizer, tmp_path):
    model = trained()
    folder = tmp_path / "hf"
    export_hf(model.state_dict(), model.config, tokenizer, folder, **NAMES, max_shard_bytes=100_000)
    export_hf(model.state_dict(), model.config, tokenizer, folder, **NAMES)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis\.tex', which is no part of an export"):
        export_hf(model.state_dict(), model.config, tokenizer, folder, **NAMES)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_a_failed_export_leaves_nothing_and_keeps_the_earlier_one(tokenizer, tmp_path, monkeypatch):
    model = trained()
    folder = export_hf(model.state_dict(), model.config, tokenizer, tmp_path / "hf", **NAMES)
    before = (folder / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(export_module, "_write_settings", full)
    for name in ("hf", "new"):
        with pytest.raises(OSError, match="no space"):
            export_hf(model.state_dict(), model.config, tokenizer, tmp_path / name, **NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({"vocab_size": 295}, {}, "vocab_size=295 is too small .* ids up to 295; .*=296"),
        (
            {},
            {"eos_token": "</s>"},
            r"eos_token='</s>' is not in the tokenizer's vocabulary; .*<\|",
        ),
        ({}, {"bos_token": "<s>"}, "bos_token='<s>' is not in"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer, tmp_path, config, names, message):
    with pytest.raises(ValueError, match=message):
        check_export(ModelConfig(**BASE | config), tokenizer, tmp_path / "hf", **NAMES | names)
    empty = Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="is not in the tokenizer's vocabulary"):
        check_export(ModelConfig(**BASE), empty, tmp_path / "hf", **NAMES)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        check_export(ModelConfig(**BASE), tokenizer, tmp_path / "file", **NAMES)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused(tokenizer, tmp_path, fault):
    model = trained()
    state = dict(model.state_dict())
    match fault:
        case "missing":
            del state["model.norm.weight"]
        case "unknown":
            state["module.model.norm.weight"] = state["model.norm.weight"]
        case "shape":
            state["model.norm.weight"] = torch.ones(63)
    with pytest.raises(ValueError, match=r"weights do not fit .*model\.norm\.weight"):
        export_hf(state, model.config, tokenizer, tmp_path / "hf", **NAMES)
    assert not list(tmp_path.iterdir())
