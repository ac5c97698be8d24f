"""What does a rank need before it meets the others, and what can still be refused here?

    request -> device, text in tokens, precision, model with its weights -> Prepared

    prepared = prepare(read_request(["--steps", "5"]))
    prepared.corpus.num_samples(128), prepared.model.config.num_params

All ranks do this alike, from the same request, so all of them refuse or none does; but folders are
rank 0's alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from labsupport.checkpoint import check_export, load_hf
from labsupport.config import ParallelConfig, TrainConfig
from labsupport.data import Corpus, encode_corpus, load_corpus
from labsupport.devices import choose_device, threads_per_rank
from labsupport.model import Llama
from labsupport.train.assemble import build_model
from labsupport.train.folders import create, folders_of
from labsupport.train.precision import Precision
from labsupport.train.request import Request


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that one rank needs to start."""

    request: Request
    rank: int
    device: torch.device
    backend: Literal["gloo", "nccl"]
    precision: Precision
    corpus: Corpus
    model: Llama
    """On `device`, or on meta if only its shards are ever to be there; not yet distributed."""
    run_dir: Path
    """Rank 0 writes there."""


def prepare(request: Request, *, rank: int = 0) -> Prepared:
    """Choose the device, load the text, build the model. ValueError: the request is wrong."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place = choose_device(local_ranks, request.device)
    device = torch.device("cpu")
    if place.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_per_rank(local_ranks))
    precision = Precision.named(request.config.mixed_precision, device=str(device))
    weights, corpus = load_inputs(request)
    check_length(corpus, request.config, request.parallel)
    # Shards are drawn where they lie: no rank holds the whole model. Whether activations can be
    # moved off a device is asked of a model that is on one.
    shards = request.parallel.data_parallel_sharding in ("fsdp", "hsdp") and weights is None
    starts_on_meta = shards and request.config.recompute.mode != "offload"
    model = build_model(
        request.model,
        request.config,
        precision=precision,
        device="meta" if starts_on_meta else device,
        weights=weights,
        compiled=request.compile,
    )
    folders = folders_of(request)
    if rank == 0:
        if request.export_hf is not None:
            special = {"bos_token": corpus.bos_token, "eos_token": corpus.eos_token}
            check_export(request.model, corpus.tokenizer, request.export_hf, **special)
        create(*folders)
    return Prepared(
        request=request,
        rank=rank,
        device=device,
        backend=place.backend,
        precision=precision,
        corpus=corpus,
        model=model,
        run_dir=folders[0],
    )


def check_length(corpus: Corpus, config: TrainConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError for a text with fewer samples than one global batch."""
    samples, batch = corpus.num_samples(config.seq_len), config.global_batch_size(parallel)
    if samples < batch:
        fits = samples // (batch // config.micro_batch_size)
        works = f"--batch-size {fits}" if fits else "a shorter --seq-len"
        raise ValueError(
            f"the text ({corpus.name}) holds {samples} training samples of {config.seq_len} "
            f"tokens, but one global batch takes {batch}; {works} or a longer text works"
        )


def load_inputs(request: Request) -> tuple[dict[str, Tensor] | None, Corpus]:
    """Weights of a folder and the text in its tokens; or no weights, and tokens of our own."""
    if request.weights is None:
        return None, load_corpus(request.data)
    loaded = load_hf(request.weights)
    special = {"bos_token": loaded.bos_token, "eos_token": loaded.eos_token}
    return loaded.state_dict, encode_corpus(loaded.tokenizer, path=request.data, **special)
