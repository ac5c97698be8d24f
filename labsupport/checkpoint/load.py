"""How does a model in Hugging Face's format become ours?

config.json -> ModelConfig      *.safetensors -> tensors by name      tokenizer.json -> Tokenizer

loaded = load_hf("out")
model = Llama.from_hf_state_dict(loaded.config, loaded.state_dict)
loaded.tokenizer.token_to_id(loaded.eos_token)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from labsupport.config import ModelConfig

EXAMPLE = "name a folder that --export-hf or transformers' save_pretrained wrote"


class HfModel(NamedTuple):
    """A folder in Hugging Face's format, read."""

    config: ModelConfig
    state_dict: dict[str, Tensor]
    """As stored: on the CPU, in the stored type; a tied `lm_head.weight` may be left out."""
    tokenizer: Tokenizer
    bos_token: str
    eos_token: str


def load_hf(folder: str | Path) -> HfModel:
    """Read `folder`. Raises ValueError, in one line, where it is not a Llama with a tokenizer."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"model folder {str(folder)!r} does not exist; {EXAMPLE}")
    raw = _read_json(folder / "config.json")
    try:
        config = ModelConfig.from_hf(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / 'config.json')!r}: {error}; {EXAMPLE}") from None
    tokenizer, bos_token, eos_token = _read_tokenizer(folder, raw)
    if max(tokenizer.get_vocab().values()) >= config.vocab_size:
        raise ValueError(
            f"{str(folder)!r}: its tokenizer has ids up to {max(tokenizer.get_vocab().values())}, "
            f"beyond vocab_size={config.vocab_size} of its config.json; {EXAMPLE}"
        )
    return HfModel(config, _read_weights(folder), tokenizer, bos_token, eos_token)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{str(index)!r} has no weight_map; {EXAMPLE}")
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
            raise ValueError(f"{str(folder / name)!r} {problem}; {EXAMPLE}") from None
    return weights


def _read_tokenizer(folder: Path, config: dict[str, Any]) -> tuple[Tokenizer, str, str]:
    """The tokenizer, and the names of the tokens that open and end a document."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{str(file)!r} is missing; {EXAMPLE}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises Exception itself
        raise ValueError(f"{str(file)!r} is damaged; {EXAMPLE}") from None
    settings = folder / "tokenizer_config.json"
    named = _read_json(settings) if settings.exists() else {}
    bos = _special_token("bos_token", named, config, tokenizer)
    return tokenizer, bos, _special_token("eos_token", named, config, tokenizer)


def _special_token(
    name: str, named: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer
) -> str:
    """From tokenizer_config.json (a word, or a dict around it), else by its id in config.json."""
    token = named.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        number = config.get(f"{name}_id")
        first = number[0] if isinstance(number, list) and number else number
        token = tokenizer.id_to_token(first) if isinstance(first, int) else None
    if not isinstance(token, str) or tokenizer.token_to_id(token) is None:
        raise ValueError(f"{name}={token!r} is not in the vocabulary of the tokenizer; {EXAMPLE}")
    return token


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ValueError(f"{str(file)!r} {problem}; {EXAMPLE}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} is no JSON object; {EXAMPLE}")
    return content
