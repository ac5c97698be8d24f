"""Which tokens does rank r see at step s? The same global batch for any number of ranks.

    order of epoch e   = a shuffle of all samples, drawn from (seed, e)
    global batch s     = samples s·G … s·G + G - 1 of the epochs laid end to end
    rank r of N        = the r-th of N equal pieces of the global batch

    data = load_corpus()                    # text, tokenizer, tokens; cached on disk
    batch = data.batch(0, seq_len=128, global_batch_size=16, rank=0, world_size=2, seed=0)
    batch.input_ids.shape                   # (8, 128); batch.labels holds the next tokens

No rank keeps a position: step 1000 can be asked for directly, so a resumed run sees what an
uninterrupted one would. The text is the documentation that comes with every Python
(`pydoc_data.topics`), or your own file.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from labsupport.config import IGNORE_INDEX
from labsupport.corpus import (
    BOS_TOKEN,
    EOS_TOKEN,
    VOCAB_SIZE,
    python_documentation,
    read_text,
    text_sha256,
    tokenize_cached,
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids and the tokens that follow them; both (batch, seq), int64, on the CPU."""

    input_ids: Tensor
    labels: Tensor
    """labels[:, i] follows input_ids[:, i]; IGNORE_INDEX where nothing is to be predicted."""
    sample_ids: tuple[int, ...] = ()
    """Which samples of the corpus these rows are."""

    @property
    def num_tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE_INDEX).sum())

    def micro_batches(self, num_microbatches: int) -> list[Batch]:
        """Cut into equal pieces, in order, for gradient accumulation or a pipeline."""
        rows = len(self.input_ids)
        _check_divides("num_microbatches", num_microbatches, "batch of rows", rows)
        size = rows // num_microbatches
        pieces = [slice(start, start + size) for start in range(0, rows, size)]
        return [
            Batch(self.input_ids[piece], self.labels[piece], self.sample_ids[piece])
            for piece in pieces
        ]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens, its tokenizer, and batches addressed by (seed, step, rank).

    Tokens are (tokens,), int64, every document between BOS and EOS.
    """

    name: str
    """Where the text came from."""
    sha256: str
    """Hash of the text: two corpora with the same one are the same."""
    tokenizer: Tokenizer = field(repr=False)
    train_tokens: Tensor = field(repr=False)
    """All but the end of the text."""
    validation_tokens: Tensor = field(repr=False)
    """The end of the text, never in a training batch."""
    bos_token: str = BOS_TOKEN
    """Opens a document."""
    eos_token: str = EOS_TOKEN
    """Ends a document."""

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Hash of the tokenizer: two with the same one give the same ids."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    @property
    def tokens(self) -> Tensor:
        """The whole text."""
        return torch.cat((self.train_tokens, self.validation_tokens))

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer, the two special ones included."""
        return self.tokenizer.get_vocab_size()

    @property
    def bos_id(self) -> int:
        """Number of `bos_token`."""
        return self.tokenizer.get_vocab()[self.bos_token]

    @property
    def eos_id(self) -> int:
        """Number of `eos_token`."""
        return self.tokenizer.get_vocab()[self.eos_token]

    def encode(self, text: str) -> list[int]:
        """Text to token ids, without BOS and EOS."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Token ids to text, without BOS and EOS."""
        return self.tokenizer.decode(ids.tolist() if isinstance(ids, Tensor) else list(ids))

    def num_samples(self, seq_len: int) -> int:
        """Training samples of `seq_len` tokens: side by side, what is left at the end unused."""
        return max(0, len(self.train_tokens) - 1) // seq_len

    def sample_ids(
        self, step: int, *, seq_len: int, global_batch_size: int, seed: int = 0
    ) -> list[int]:
        """Samples of the global batch of `step`, in order. Every epoch holds each exactly once."""
        longest = len(self.train_tokens) - 1
        if step < 0 or not 1 <= seq_len <= longest:
            raise ValueError(
                f"{step=} must be at least 0 and {seq_len=} in 1…{longest} (the tokens of the "
                f"training text), for example step=0, seq_len={min(128, longest)}"
            )
        total = self.num_samples(seq_len)
        if not 1 <= global_batch_size <= total:
            raise ValueError(
                f"{global_batch_size=} must lie in 1…{total}, the training samples of {seq_len} "
                f"tokens in this text, for example {min(8, total)}; or use a longer text"
            )
        first = step * global_batch_size
        epochs = range(first // total, (first + global_batch_size - 1) // total + 1)
        order = [sample for epoch in epochs for sample in shuffled(total, seed=seed, epoch=epoch)]
        return order[first % total :][:global_batch_size]

    def batch(
        self,
        step: int,
        *,
        seq_len: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> Batch:
        """The piece of data-parallel rank `rank` of `world_size`: (global_batch_size / N, seq_len).

        `seed` must be the same on all ranks. Raises ValueError for a batch that the ranks cannot
        share equally, and for a text with fewer samples than one batch.
        """
        _check_rank(rank, world_size)
        _check_divides("world_size", world_size, "global_batch_size", global_batch_size)
        ids = self.sample_ids(step, seq_len=seq_len, global_batch_size=global_batch_size, seed=seed)
        size = global_batch_size // world_size
        mine = ids[rank * size : (rank + 1) * size]
        windows = torch.stack([self.train_tokens[i * seq_len :][: seq_len + 1] for i in mine])
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), tuple(mine))

    def validation_batches(
        self, *, seq_len: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """This rank's share of the held-out text; over all ranks every token is predicted once.

        The last sample is padded (IGNORE_INDEX), and ranks may get unequal numbers of batches: add
        up sums and counts, do not average means.
        """
        _check_rank(rank, world_size)
        if seq_len < 1 or batch_size < 1:
            raise ValueError(
                f"{seq_len=} and {batch_size=} must be at least 1, for example 128 and 8"
            )
        held_out = self.validation_tokens.tolist()
        starts = list(range(0, len(held_out) - 1, seq_len))[rank::world_size]
        for i in range(0, len(starts), batch_size):
            rows = [held_out[start:][: seq_len + 1] for start in starts[i : i + batch_size]]
            yield pad_batch(rows, seq_len=seq_len, pad_id=self.eos_id)


def pad_batch(rows: Sequence[Sequence[int]], *, seq_len: int, pad_id: int) -> Batch:
    """Rows of 2 … seq_len + 1 tokens to one (rows, seq_len) batch, IGNORE_INDEX after the end."""
    if not rows or not all(2 <= len(row) <= seq_len + 1 for row in rows):
        lengths = [len(row) for row in rows]
        raise ValueError(
            f"rows of {lengths} tokens must have 2…{seq_len + 1}, for example [[0, 1]]"
        )
    inputs = [[*row[:-1]] + [pad_id] * (seq_len + 1 - len(row)) for row in rows]
    labels = [[*row[1:]] + [IGNORE_INDEX] * (seq_len + 1 - len(row)) for row in rows]
    return Batch(torch.tensor(inputs), torch.tensor(labels))


def load_corpus(
    path: str | Path | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    validation_fraction: float = 0.1,
    cache_dir: str | Path | None = None,
) -> Corpus:
    """Text, tokenizer and tokens: Python's documentation, or the UTF-8 text file at `path`.

    The first call trains a byte-level BPE tokenizer and keeps it with the tokens in `cache_dir`
    (default: $XDG_CACHE_HOME/labsupport or ~/.cache/labsupport), under the hash of the text.
    Several processes may do so at once. Raises ValueError for a file that is missing, empty, too
    short or not text.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"{validation_fraction=} must lie between 0 and 1, for example 0.1")
    name, documents = _documents(path)
    text = tokenize_cached(documents, vocab_size=vocab_size, cache_dir=cache_dir)
    tokens = torch.from_numpy(text.tokens).long()
    train, held_out = _split(tokens, validation_fraction, name=name)
    return Corpus(name, text.sha256, text.tokenizer, train, held_out)


def encode_corpus(
    tokenizer: Tokenizer, *, bos_token: str, eos_token: str, path: str | Path | None = None
) -> Corpus:
    """The same text in the tokens of a model that exists already; a tenth is held out.

    Raises ValueError for a file that is missing, empty, too short or not text, and for special
    tokens that the tokenizer does not know.
    """
    name, documents = _documents(path)
    vocabulary = tokenizer.get_vocab()
    for kind, token in (("bos_token", bos_token), ("eos_token", eos_token)):
        if token not in vocabulary:
            raise ValueError(
                f"{kind}={token!r} is not in the tokenizer's vocabulary; name one that is, for "
                f"example {tokenizer.id_to_token(0)!r}"
            )
    bos, eos = vocabulary[bos_token], vocabulary[eos_token]
    # Some tokenizers put BOS before every text by themselves: not twice.
    texts = tokenizer.encode_batch(documents, add_special_tokens=False)
    tokens = torch.tensor([token for text in texts for token in (bos, *text.ids, eos)])
    train, held_out = _split(tokens, 0.1, name=name)
    sha256 = text_sha256(documents)
    return Corpus(name, sha256, tokenizer, train, held_out, bos_token, eos_token)


def _documents(path: str | Path | None) -> tuple[str, list[str]]:
    """Name and chapters of the text."""
    if path is None:
        return "pydoc_data.topics", python_documentation()
    return str(path), [read_text(path)]


def _split(tokens: Tensor, validation_fraction: float, *, name: str) -> tuple[Tensor, Tensor]:
    """All but the end of the text, and the end; each must hold something to predict."""
    cut = round(len(tokens) * (1 - validation_fraction))
    if min(cut, len(tokens) - cut) < 2:
        raise ValueError(
            f"data file {name!r} holds {len(tokens)} tokens, of which {validation_fraction=} "
            f"leaves {len(tokens) - cut} to validate on; give a text of a thousand words or more"
        )
    return tokens[:cut], tokens[cut:]


def shuffled(total: int, *, seed: int, epoch: int) -> list[int]:
    """0 … total - 1 in the order of `epoch`, the same on every machine."""
    return list(_order(total, seed, epoch))


@lru_cache(maxsize=4)  # every step asks for it
def _order(total: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(total))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # hashes the text: no two epochs share a stream
    return tuple(order)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank=} must lie in 0…world_size - 1, {world_size=}, for example rank=0")


def _check_divides(name: str, parts: int, whole_name: str, whole: int) -> None:
    if parts < 1 or whole % parts:
        works = max(n for n in range(1, max(1, min(parts, whole)) + 1) if whole % n == 0)
        raise ValueError(f"{name}={parts} must divide {whole_name}={whole}, for example {works}")
