"""Data: the same global batch whatever the ranks, each sample once an epoch, one cache for all."""

import pickle
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from labsupport import corpus as corpus_module
from labsupport.config import IGNORE_INDEX
from labsupport.corpus import BOS_TOKEN, EOS_TOKEN, python_documentation, tokenize_cached
from labsupport.data import Batch, encode_corpus, load_corpus, pad_batch, shuffled

SENTENCE = "Every rank reads its own part of the same text, and nobody reads a line twice. "


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(cache):
    return load_corpus(cache_dir=cache)


@pytest.fixture(scope="module")
def small(cache, tmp_path_factory):
    """A text of a few dozen samples, so that epochs are short."""
    file = tmp_path_factory.mktemp("text") / "own.txt"
    file.write_text("".join(f"{i}: {SENTENCE}\n" for i in range(40)))
    return load_corpus(file, vocab_size=300, cache_dir=cache)


def test_corpus_is_the_python_documentation(data):
    assert data.name == "pydoc_data.topics"
    assert data.vocab_size == 2048
    assert {data.bos_id, data.eos_id} == {0, 1}
    assert data.tokens.dtype == torch.int64
    assert 0 <= int(data.tokens.min()) <= int(data.tokens.max()) < 2048
    assert len(data.train_tokens) + len(data.validation_tokens) == len(data.tokens) > 100_000


def test_every_document_comes_back_from_its_tokens(data):
    documents = python_documentation()
    assert documents == python_documentation()
    tokens = data.tokens
    stops = (tokens == data.eos_id).nonzero().flatten().tolist()
    assert len(stops) == len(documents)
    starts = [0, *(stop + 1 for stop in stops[:-1])]
    for start, stop, text in zip(starts, stops, documents, strict=True):
        assert tokens[start] == data.bos_id
        assert data.decode(tokens[start + 1 : stop]) == text


@pytest.mark.parametrize("text", ["naïve café 你好 🙂", "\ttabs\n\n  and spaces ", "\x07 control"])
def test_any_text_survives_encoding(data, text):
    assert data.decode(data.encode(text)) == text


def test_labels_are_the_next_tokens(data):
    batch = data.batch(3, seq_len=64, global_batch_size=4)
    assert batch.input_ids.shape == batch.labels.shape == (4, 64)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1])
    first = batch.sample_ids[0] * 64
    assert torch.equal(batch.labels[0], data.train_tokens[first + 1 : first + 65])
    assert batch.num_tokens == 4 * 64


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [0, 1, 75, 5000])
def test_ranks_together_see_the_global_batch_in_order(data, world_size, step):
    kind = {"seq_len": 128, "global_batch_size": 12, "seed": 7}
    whole = data.batch(step, **kind)
    pieces = [data.batch(step, **kind, rank=r, world_size=world_size) for r in range(world_size)]
    assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), whole.input_ids)
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), whole.labels)
    assert sum((piece.sample_ids for piece in pieces), ()) == whole.sample_ids


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ids_are_disjoint_and_complete_in_every_epoch(small, world_size):  # T10
    total, batch_size = small.num_samples(16), 8
    assert total % batch_size  # the last batch of an epoch runs into the next one
    kind = {"seq_len": 16, "global_batch_size": batch_size, "world_size": world_size}
    seen = [
        sample
        for step in range(3 * total // batch_size + 1)
        for rank in range(world_size)
        for sample in small.batch(step, **kind, rank=rank).sample_ids
    ]
    epochs = [seen[start : start + total] for start in range(0, 3 * total, total)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(total))
    assert epochs[0] != epochs[1] != epochs[2]  # T9


def test_order_repeats_by_seed_and_differs_by_seed(small):
    ids = [small.sample_ids(5, seq_len=16, global_batch_size=8, seed=seed) for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]


def test_order_is_pinned():
    """A change here would silently change every run that is resumed or compared."""
    assert shuffled(8, seed=0, epoch=0) == [0, 2, 1, 4, 6, 7, 3, 5]


def test_seeds_and_epochs_do_not_share_a_stream():
    orders = {tuple(shuffled(50, seed=s, epoch=e)) for s in range(12) for e in range(12)}
    assert len(orders) == 144


def test_micro_batches_cut_the_rows_in_order(data):
    batch = data.batch(0, seq_len=32, global_batch_size=6)
    pieces = batch.micro_batches(3)
    assert [piece.input_ids.shape for piece in pieces] == [(2, 32)] * 3
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), batch.labels)
    assert sum((piece.sample_ids for piece in pieces), ()) == batch.sample_ids
    with pytest.raises(ValueError, match="num_microbatches=4 must divide batch of rows=6, for ex"):
        batch.micro_batches(4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_predicts_every_held_out_token_once(small, world_size):
    labels = []
    for rank in range(world_size):
        for batch in small.validation_batches(
            seq_len=16, batch_size=4, rank=rank, world_size=world_size
        ):
            labels += batch.labels[batch.labels != IGNORE_INDEX].tolist()
    assert Counter(labels) == Counter(small.validation_tokens[1:].tolist())


def test_padding_is_ignored_in_the_labels():
    batch = pad_batch([[5, 6, 7], [5, 6]], seq_len=3, pad_id=1)
    assert batch.input_ids.tolist() == [[5, 6, 1], [5, 1, 1]]
    assert batch.labels.tolist() == [[6, 7, IGNORE_INDEX], [6, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch.num_tokens == 3
    with pytest.raises(ValueError, match=r"rows of \[1\] tokens must have 2…4"):
        pad_batch([[5]], seq_len=3, pad_id=1)


def test_training_and_validation_text_do_not_overlap(data):
    assert torch.equal(torch.cat((data.train_tokens, data.validation_tokens)), data.tokens)
    last = data.num_samples(128) * 128
    assert last < len(data.train_tokens)


def test_corpus_can_be_sent_to_a_rank(data):
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.tokens, data.tokens)
    assert copy.decode(copy.encode("hello")) == "hello"


def test_tokenizer_loads_in_transformers(data, tmp_path):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN
    )
    fast.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "The import statement\n    combines two operations."
    assert again(text)["input_ids"] == data.encode(text)
    assert again.decode(data.encode(text)) == text
    assert again.eos_token_id == data.eos_id < data.vocab_size


BUILDER = """
import sys, time
from labsupport import corpus
built = []
original = corpus._build
def counted(*args, **kwargs):
    built.append(1)
    return original(*args, **kwargs)
corpus._build = counted
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
text = corpus.tokenize_cached(corpus.python_documentation(), cache_dir=sys.argv[1])
print(len(built), len(text.tokens), int(text.tokens.sum()), text.tokenizer.get_vocab_size())
"""


def test_processes_that_build_the_cache_at_once_do_not_race(tmp_path):
    start = str(time.time() + 2.0)
    command = [sys.executable, "-W", "error", "-c", BUILDER, str(tmp_path), start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 5
    assert sum(int(built) for built, *_ in outputs) == 1  # one builds, the others wait and read
    assert len({tuple(rest) for _, *rest in outputs}) == 1
    assert len(list(tmp_path.glob("*.npz"))) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_building_twice_gives_the_same_tokens(tmp_path):
    first, second = (
        tokenize_cached(python_documentation(), cache_dir=tmp_path / name) for name in "ab"
    )
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.tokenizer.to_str() == second.tokenizer.to_str()


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "text", "other"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    documents = [SENTENCE * 20]
    good = tokenize_cached(documents, vocab_size=300, cache_dir=tmp_path)
    (file,) = tmp_path.glob("*.npz")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        {
            "empty": b"",
            "half": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
            "text": b"not an archive",
            "other": _cache_of_another_text(tmp_path / "elsewhere"),
        }[damage]
    )
    again = tokenize_cached(documents, vocab_size=300, cache_dir=tmp_path)
    assert again.tokens.tolist() == good.tokens.tolist()
    assert file.read_bytes() == content


def _cache_of_another_text(folder):
    tokenize_cached([SENTENCE.upper() * 20], vocab_size=300, cache_dir=folder)
    return next(folder.glob("*.npz")).read_bytes()


def test_a_filled_cache_is_read_not_built(tmp_path, monkeypatch):
    documents = [SENTENCE * 20]
    first = tokenize_cached(documents, vocab_size=300, cache_dir=tmp_path)
    monkeypatch.setattr(corpus_module, "_build", lambda *_, **__: pytest.fail("built again"))
    second = tokenize_cached(documents, vocab_size=300, cache_dir=tmp_path)
    assert second.tokens.tolist() == first.tokens.tolist()


def test_another_text_or_vocabulary_gets_another_file(tmp_path):
    tokenize_cached([SENTENCE * 20], vocab_size=300, cache_dir=tmp_path)
    tokenize_cached([SENTENCE * 20], vocab_size=310, cache_dir=tmp_path)
    tokenize_cached([SENTENCE * 21], vocab_size=300, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 3


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="tokens are not cached in"):
        text = tokenize_cached([SENTENCE * 20], vocab_size=300, cache_dir=tmp_path / "file" / "x")
    assert len(text.tokens) > 0


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpus_module.default_cache_dir() == tmp_path / "labsupport"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus_module.default_cache_dir() == tmp_path / ".cache" / "labsupport"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 characters"),
        (b" \n" * 2000, "holds 0 characters"),
        (b"too short", "holds 9 characters"),
        (b"\xff\xfe\x00\x01" * 500, "is not UTF-8 text"),
        (b"text\x00more" * 500, "is binary"),
        ("grüße\n".encode("latin-1") * 500, "is not UTF-8 text"),
    ],
)
def test_files_that_are_no_text_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_corpus(file, cache_dir=tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.npz"))


def test_a_text_without_tokens_to_validate_on_is_refused(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("a" * 2000)
    with pytest.raises(ValueError, match=r"own\.txt' holds \d+ tokens, of which .* leaves \d"):
        load_corpus(file, cache_dir=tmp_path)


def test_a_given_tokenizer_is_used_with_its_own_special_tokens(cache, tmp_path):
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "rank": 3, "the": 4, "text": 5}
    theirs = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs.post_processor = processors.TemplateProcessing(  # as Llama's: BOS before every text
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    file = tmp_path / "own.txt"
    file.write_text(SENTENCE * 20)
    given = encode_corpus(theirs, bos_token="<s>", eos_token="</s>", path=file)
    assert (given.bos_id, given.eos_id, given.vocab_size) == (0, 1, 6)
    assert given.tokens[:4].tolist() == [0, 2, 3, 2]
    assert (given.tokens == 0).sum() == (given.tokens == 1).sum() == 1
    assert given.encode("the rank") == [4, 3]
    own = load_corpus(file, vocab_size=300, cache_dir=cache)
    assert own.sha256 == given.sha256
    assert own.tokenizer_sha256 != given.tokenizer_sha256
    with pytest.raises(ValueError, match=r"bos_token='<x>' is not in .* for example '<s>'"):
        encode_corpus(theirs, bos_token="<x>", eos_token="</s>", path=file)


def test_a_copy_of_the_tokenizer_gives_the_same_tokens(small):
    copy = Tokenizer.from_str(small.tokenizer.to_str())
    names = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    again = encode_corpus(copy, **names, path=small.name)
    assert torch.equal(again.tokens, small.tokens)
    assert torch.equal(again.train_tokens, small.train_tokens)
    assert again.tokenizer_sha256 == small.tokenizer_sha256


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_missing_file_or_a_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be read"):
        load_corpus(tmp_path / name, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 must lie in 0…world_size - 1"),
        ({"world_size": 3}, "world_size=3 must divide global_batch_size=8, for example 2"),
        ({"step": -1}, "step=-1 must be at least 0"),
        ({"seq_len": 0}, "seq_len=0 in 1…"),
        ({"seq_len": 10**6}, "seq_len=1000000 in 1…"),
        ({"global_batch_size": 10**6}, r"global_batch_size=1000000 must lie in 1…\d+"),
        ({"global_batch_size": 0}, "global_batch_size=0 must lie in 1…"),
    ],
)
def test_batches_that_cannot_be(small, change, message):
    asked = {"step": 0, "seq_len": 16, "global_batch_size": 8} | change
    with pytest.raises(ValueError, match=message):
        small.batch(asked.pop("step"), **asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "vocab_size=100 must be at least 258, for example 2048"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must lie between 0 and 1"),
    ],
)
def test_corpora_that_cannot_be(cache, change, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(cache_dir=cache, **change)


def test_the_proof_of_disjoint_ids_can_fail(small, monkeypatch):
    """Per-rank seeds, the mistake of T10, would be seen."""
    original = type(small).batch

    def seeded_by_rank(self, step, *, rank=0, seed=0, **kind):
        return original(self, step, rank=rank, seed=seed + rank, **kind)

    monkeypatch.setattr(type(small), "batch", seeded_by_rank)
    with pytest.raises(AssertionError):
        test_ids_are_disjoint_and_complete_in_every_epoch(small, 2)


def test_batch_counts_what_is_valid():
    ones = torch.ones(1, 2, dtype=torch.int64)
    assert Batch(ones, torch.tensor([[IGNORE_INDEX, 3]])).num_tokens == 1
