"""How does text become numbers, once, however many processes ask at the same moment?

    text -> byte-level BPE (256 bytes, then the most frequent pairs, merged) -> token ids

    text = tokenize_cached(python_documentation())      # 0.3 s the first time, then 20 ms
    text.tokenizer.decode(text.tokens[:20])
    text.tokens                                         # (tokens,) int32

The result is kept in one file per (text, vocabulary, version of tokenizers). It is written under
another name and moved into place, so nobody reads half a file; a lock lets the others wait for the
first instead of doing the same work; a file that is damaged all the same is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
BOS_TOKEN, EOS_TOKEN = "<|begin_of_text|>", "<|end_of_text|>"
SMALLEST_VOCAB_SIZE = 258  # 256 bytes and the two above
SMALLEST_TEXT = 1000  # characters
LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text as token ids, every document between BOS and EOS."""

    sha256: str
    """Hash of the text."""
    tokenizer: Tokenizer
    tokens: NDArray[np.int32]


def python_documentation() -> list[str]:
    """The chapters of `pydoc_data.topics`, sorted by name: 465,000 characters, in every Python."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; ValueError when it is missing, not text, empty or too short."""
    problem = None
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    else:
        if "\0" in text:
            problem = "is binary (it holds NUL)"
        elif len(text.strip()) < SMALLEST_TEXT:
            problem = f"holds {len(text.strip())} characters"
    if problem is not None:
        raise ValueError(
            f"data file {str(path)!r} {problem}; give a UTF-8 text of at least {SMALLEST_TEXT} "
            f"characters, for example a README of 100,000"
        )
    return text


def tokenize_cached(
    documents: Sequence[str], *, vocab_size: int = VOCAB_SIZE, cache_dir: str | Path | None = None
) -> TokenizedText:
    """Train the tokenizer on `documents` and apply it, or read what an earlier call kept.

    `cache_dir` is left out for $XDG_CACHE_HOME/labsupport or ~/.cache/labsupport. A folder that
    cannot be written costs a warning, nothing else. Raises ValueError for too small a vocabulary.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise ValueError(f"{vocab_size=} must be at least {SMALLEST_VOCAB_SIZE}, for example 2048")
    sha256 = text_sha256(documents)
    folder = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    file = folder / f"tokens-{sha256[:16]}-{vocab_size}-{tokenizers.__version__}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            kept = _read(file, sha256)
            if kept is not None:
                return kept
            built = _build(documents, vocab_size=vocab_size, sha256=sha256)
            _write(file, built)
            return built
    except OSError as error:
        warnings.warn(f"tokens are not cached in {folder}: {error}", stacklevel=2)
        return _build(documents, vocab_size=vocab_size, sha256=sha256)


def text_sha256(documents: Sequence[str]) -> str:
    """Hash of a text and of where its documents end."""
    return hashlib.sha256(json.dumps(list(documents)).encode()).hexdigest()


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/labsupport, or ~/.cache/labsupport."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "labsupport"


def _build(documents: Sequence[str], *, vocab_size: int, sha256: str) -> TokenizedText:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos, eos = tokenizer.token_to_id(BOS_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
    ids = [token for text in documents for token in (bos, *tokenizer.encode(text).ids, eos)]
    return TokenizedText(sha256, tokenizer, np.array(ids, dtype=np.int32))


def _write(file: Path, text: TokenizedText) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as draft:
        try:
            as_bytes = np.frombuffer(text.tokenizer.to_str().encode(), dtype=np.uint8)
            np.savez(draft, sha256=text.sha256, tokenizer=as_bytes, tokens=text.tokens)
            draft.flush()
            os.replace(draft.name, file)
        except BaseException:
            os.unlink(draft.name)
            raise


def _read(file: Path, sha256: str) -> TokenizedText | None:
    """What `_write` kept, or None when it is missing or damaged (the archive has checksums)."""
    try:
        with open(file, "rb") as handle, np.load(handle) as kept:
            if str(kept["sha256"]) != sha256:
                return None
            tokenizer = Tokenizer.from_str(kept["tokenizer"].tobytes().decode())
            return TokenizedText(sha256, tokenizer, kept["tokens"])
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


@contextmanager
def _locked(file: Path) -> Iterator[Any]:
    """Hold `file` against other processes; the system lets go of it however this one ends."""
    with open(file, "w") as handle:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.02)
        yield handle  # after the deadline: build it too, which is slower and as safe
