"""How does the model reach everyone else's tools? As a folder in Hugging Face's format.

    config.json  model*.safetensors  generation_config.json
    tokenizer.json  tokenizer_config.json  special_tokens_map.json  chat_template.jinja

    export_hf(weights, config, tokenizer, "out", bos_token="<s>", eos_token="</s>")
    transformers.AutoModelForCausalLM.from_pretrained("out")        # no key missing, none left over

The folder is written under another name and moved into place, so nobody loads half a model.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from labsupport.config import ModelConfig
from labsupport.model import Llama

MAX_SHARD_BYTES = 5 * 10**9
# "user: hello" on a line each: the model was not trained on any format, so take one that is plain.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_WRITTEN = (
    *("config.json", "generation_config.json", "model*.safetensors", "model*.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "chat_template.jinja"),
    "manifest.json",  # the trainer puts it there: which run made this model
)


def export_hf(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    bos_token: str,
    eos_token: str,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write `folder`; an earlier export there is replaced. `dtype` None keeps that of the weights.

    Raises ValueError for what `check_export` refuses, and for weights that are not those of
    `config`: a name too many or too few, a wrong shape, two matrices where one is tied.
    """
    from huggingface_hub import save_torch_state_dict

    check_export(config, tokenizer, folder, bos_token=bos_token, eos_token=eos_token)
    weights = _weights(state_dict, config, dtype=dtype)
    folder = Path(folder).expanduser().resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}.tmp")
    draft.mkdir()
    try:
        save_torch_state_dict(dict(weights), draft, max_shard_size=max_shard_bytes)
        stored_as = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        _write_settings(draft, config, tokenizer, bos_token, eos_token, stored_as)
        _move_into_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def check_export(
    config: ModelConfig, tokenizer: Tokenizer, folder: str | Path, *, bos_token: str, eos_token: str
) -> None:
    """Raise ValueError now for an export that would fail after the training.

    A tokenizer with more entries than the model, without the two special tokens, or a folder that
    holds something else.
    """
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(
            f"vocab_size={config.vocab_size} is too small for a tokenizer with ids up to "
            f"{largest}; give the model at least vocab_size={largest + 1}"
        )
    for name, token in (("bos_token", bos_token), ("eos_token", eos_token)):
        if token not in vocabulary:
            raise ValueError(
                f"{name}={token!r} is not in the tokenizer's vocabulary; name one that is, for "
                f"example {min(vocabulary, key=vocabulary.__getitem__, default='</s>')!r}"
            )
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export folder {str(folder)!r} is a file; name a folder, such as 'out'")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not any(Path(name).match(glob) for glob in _WRITTEN)]
    if foreign:
        raise ValueError(
            f"export folder {str(folder)!r} holds {foreign[0]!r}, which is no part of an export "
            f"and would be lost; name a new folder, for example {str(folder / 'hf')!r}"
        )


def _weights(
    state_dict: Mapping[str, Tensor], config: ModelConfig, *, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """What goes into the files: checked against the model, one type, no memory in common."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Llama(config).state_dict().items()}
    given = dict(state_dict)
    if config.tie_word_embeddings:
        embedding = given.get("model.embed_tokens.weight")
        head = given.pop("lm_head.weight", embedding)
        del shapes["lm_head.weight"]
        if embedding is not None and head is not None and not torch.equal(embedding, head):
            raise ValueError(
                "lm_head.weight differs from model.embed_tokens.weight, but "
                "tie_word_embeddings=True keeps one; export with tie_word_embeddings=False"
            )
    wrong = sorted(name for name, tensor in given.items() if shapes.get(name) != tensor.shape)
    missing = sorted(shapes.keys() - given.keys())
    if wrong or missing:
        raise ValueError(
            f"weights do not fit the configuration: {len(missing)} missing {missing[:2]}, "
            f"{len(wrong)} unknown or of another shape {wrong[:2]}; give full_state_dict(model)"
        )
    kind = dtype or reduce(torch.promote_types, {tensor.dtype for tensor in given.values()})
    return _apart({name: tensor.to("cpu", kind) for name, tensor in given.items()})


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory to itself: a file would keep one of two that share it."""
    taken: set[int] = set()
    for name, tensor in weights.items():
        address = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if address in taken or not whole:  # a slice of a flat buffer, or one matrix of two names
            weights[name] = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(address)
    return weights


def _write_settings(
    draft: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    bos_token: str,
    eos_token: str,
    stored_as: str,
) -> None:
    vocabulary = tokenizer.get_vocab()
    ids = {"bos_token_id": vocabulary[bos_token], "eos_token_id": vocabulary[eos_token]}
    special = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": eos_token}
    files: dict[str, dict[str, Any]] = {
        "config.json": {**config.to_hf(**ids), "dtype": stored_as},
        "generation_config.json": {**ids, "pad_token_id": ids["eos_token_id"]},
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_seq_len,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (draft / name).write_text(text, encoding="utf-8")
    (draft / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(draft / "tokenizer.json"))


def _move_into_place(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    before = draft.with_suffix(".old")
    folder.rename(before)
    draft.rename(folder)
    shutil.rmtree(before)
