"""Which options does the trainer take?

    given = build_parser().parse_args(["--batch-size", "8"])
    given.batch_size, given.seq_len         # (8, 128)
    build_parser().parse_args(["--steps", "x"])     # ValueError, not an exit

Defaults are those of `TrainConfig`. What fits together is decided in `request.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn, get_args

from labsupport.config import DataParallelSharding, MixedPrecision, Optimizer, TrainConfig

_TRAIN = TrainConfig()


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see --help")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a default where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """All options, with their defaults."""
    parser = _Parser(
        prog="python -m labsupport.train",
        description="Train a Llama on one rank, or under torchrun on many.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    for add_group in (_add_work, _add_optimizer, _add_strategy, _add_outputs):
        add_group(parser)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the work")
    add = group.add_argument
    add("--model", default="tiny", help="tiny, 15m, 125m, 1b, llama-3.1-8b, or HF folder")
    add("--data", type=_path, metavar="FILE", help="UTF-8 text; without: Python's documentation")
    add("--seq-len", type=int, default=_TRAIN.seq_len, metavar="N", help="tokens of a sequence")
    size, accumulation = _TRAIN.micro_batch_size, _TRAIN.gradient_accumulation_steps
    add("--batch-size", type=int, default=size, metavar="N", help="micro batch of one rank")
    amount = group.add_mutually_exclusive_group()
    amount.add_argument(
        "--gradient-accumulation-steps",
        type=int,
        default=accumulation,
        metavar="N",
        help="micro batches of a rank for one optimizer step",
    )
    amount.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="in its place: sequences of all ranks for one optimizer step",
    )
    add("--steps", type=int, default=_TRAIN.steps, metavar="N", help="optimizer steps")
    add("--seed", type=int, default=_TRAIN.seed, metavar="N", help="of weights, data and dropout")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the optimizer").add_argument
    add("--optimizer", choices=get_args(Optimizer), default=_TRAIN.optimizer, help="which rule")
    rate, warmup, decay = _TRAIN.learning_rate, _TRAIN.warmup_steps, _TRAIN.weight_decay
    add("--learning-rate", type=float, default=rate, metavar="X", help="the highest")
    add("--warmup-steps", type=int, default=warmup, metavar="N", help="rise; a cosine follows")
    add("--weight-decay", type=float, default=decay, metavar="X", help="of matrices")
    clip, drop = _TRAIN.grad_clip, _TRAIN.dropout
    add("--grad-clip", type=_norm, default=clip, metavar="X", help="largest norm, or none")
    add("--dropout", type=float, default=drop, metavar="X", help="share of a block's outputs")


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the strategy").add_argument
    add(
        "--data-parallel-sharding",
        choices=get_args(DataParallelSharding),
        default="ddp",
        help="what the data-parallel ranks share out: nothing, optimizer states (zero1), gradients "
        "too (zero2), weights too (fsdp), or those within groups of ranks (hsdp)",
    )
    add(
        "--data-parallel-replicate-size",
        type=int,
        metavar="N",
        help="hsdp: groups that hold all weights; without: one a node, or 2 on a single one",
    )
    shares = {
        "tensor": "ranks that split every layer",
        "context": "ranks that split every sequence",
        "pipeline": "1 is built",
    }
    for axis, share in shares.items():
        add(f"--{axis}-parallel-size", type=int, default=1, metavar="N", help=share)
    add(
        "--sequence-parallel",
        action="store_true",
        help="tensor-parallel ranks hold different tokens between the layers",
    )
    precision, recompute = _TRAIN.mixed_precision, _TRAIN.activation_checkpointing
    add(
        "--mixed-precision",
        choices=get_args(MixedPrecision),
        default=precision,
        help="types of weights and products",
    )
    add(
        "--activation-checkpointing",
        nargs="?",
        const="full",
        default=recompute,
        metavar="HOW",
        help="none, full (if no word follows), selective, offload, or every-K",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where ranks run")
    add("--compile", action="store_true", help="torch.compile each block")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is written").add_argument
    add(
        "--run-dir",
        type=_path,
        metavar="DIR",
        help="manifest and metrics; without: the checkpoint's folder, or runs/TIME-…",
    )
    add("--checkpoint-dir", type=_path, metavar="DIR", help="a checkpoint at the end")
    add("--export-hf", type=_path, metavar="DIR", help="the model for transformers at the end")
    add("--log-every", type=int, default=1, metavar="N", help="print every N-th step")
    add("--json", action="store_true", help="one JSON object a line and step")


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody
        raise argparse.ArgumentTypeError(f"nobody has the home directory of {text!r}") from None


def _norm(text: str) -> float | None:
    return None if text == "none" else float(text)
