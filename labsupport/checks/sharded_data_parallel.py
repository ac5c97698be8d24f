"""Checks of notebook 07: what each stage holds and sends, units of fully_shard, offload's price.

    from labsupport.checks import sharded_data_parallel as check
    check.largest_model(most_params)
    check.units(shard_in_units, ranks)      # runs it on the ranks, counts gathers and whole bytes

Formulas are tried on numbers that the notebook does not show; what talks to ranks runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from labsupport.checks import Verdict, blank, function, is_blank, not_yet, number, right
from labsupport.checks.on_ranks import try_on_ranks
from labsupport.config import ModelConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.plan.parameter_shapes import ParameterShape
from labsupport.plan.sharding import shard
from labsupport.ranks import Ranks

UNITS_MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2
)
PEAKS_GIB = {8: 82.4, 128: 67.0}
DEADLINE_S = 30.0


def largest_model(answer: Any) -> Verdict:
    """`most_params(stage, num_ranks, device_bytes)`: 4 bytes weights, 4 gradients, 8 moments."""
    divided = {"ddp": 0, "zero1": 8, "zero2": 12, "zero3": 16}
    for num_ranks, device_bytes in ((8, 80e9), (64, 24e9)):
        for stage, share in divided.items():
            each = 16 - share + share / num_ranks
            hints = {
                device_bytes * num_ranks / 16: "that divides all 16 bytes; this stage does not",
                device_bytes / 16: "that divides nothing: all ranks hold everything only in ddp",
                device_bytes / each / 1e9: "that is in billions; give the number itself",
            }
            arguments, expected = (stage, num_ranks, device_bytes), device_bytes / each
            verdict = _call(answer, arguments, expected, partial(_one, expected, hints))
            if not verdict.is_right:
                return verdict
    return right("5, 8.9, 14.5 and 40 billion on 8 × 80 GB, with nothing left for activations.")


def not_divided(answer: Any) -> Verdict:
    """`(states, rest)` in GiB from two published peaks: peak(n) = states / n + rest."""
    (few, first), (many, second) = PEAKS_GIB.items()
    states = (first - second) / (1 / few - 1 / many)
    rest = first - states / few
    hints = {
        (first - second) * few: "states / 128 is small, but not nothing: subtract it as well",
        first - second: "that is the difference of the peaks: how much of the states is it?",
        rest: "that is the rest, and it comes second",
        16 * 8.03e9 / 2**30: "that is what 16 bytes a parameter give; here, ask the two peaks",
    }
    other = {second: "states / 128 is small, but not nothing: subtract it as well"}
    verdict = _two({"states": (states, hints), "rest": (rest, other)}, answer)
    if not verdict.is_right:
        return verdict
    return right("16 bytes a parameter are 120 GiB; the other 66 GiB no number of ranks divides.")


def units(answer: Any, ranks: Ranks) -> Verdict:
    """`shard_in_units(model, blocks_per_unit)`: `fully_shard` for each group, then the root."""
    for blocks_per_unit in (2, 4):
        results = try_on_ranks(_sharded_by(blocks_per_unit), answer, ranks, deadline_s=DEADLINE_S)
        if isinstance(results, Verdict):
            return results
        problem = next((found for found in results if found), None)
        if problem == "blank":
            return blank("Nothing is sharded yet.")
        if problem:
            return not_yet(f"with blocks_per_unit={blocks_per_unit}: {problem}")
    return right("Half the messages, twice the whole bytes of a block: latency against peak.")


def hsdp_bytes(answer: Any) -> Verdict:
    """`hsdp(num_params, num_ranks, num_replicas)`: bytes held, and sent between the groups."""
    for num_params, num_ranks, replicas in ((4_800, 8, 2), (4_800, 16, 4), (9_600, 8, 1)):
        shapes = [ParameterShape(name="", shape=(num_params, 1))]
        plan = shard(shapes, stage="hsdp", world_size=num_ranks, replicate_size=replicas)
        held = 4.0 * plan.held[0].parameters_bytes
        across = sum(one.link_bytes for one in plan.exchanges if one.collective == "all_reduce")
        of_held = {
            16 * num_params / num_ranks: "each group holds a copy: how many ranks divide it?",
            16 * num_params / replicas: "the ranks of a group divide a copy, not the groups",
            across: "that is what a rank sends, and it comes second",
        }
        of_sent = {
            across * num_ranks / replicas: "the reduce-scatter inside the group came first: what "
            "is left of the gradient for a rank to send?",
            across / 2: "an all-reduce is a reduce-scatter and an all-gather: it sends twice that",
            held / 4: "of an all-reduce over r ranks, a ring sends 2(r − 1)/r",
        }
        judge = partial(_two, {"held": (held, of_held), "sent": (across, of_sent)})
        verdict = _call(answer, (num_params, num_ranks, replicas), [held, across], judge)
        if not verdict.is_right:
            return verdict
    return right("Only 1/(ranks of a group) of the gradients ever leaves the group.")


def offload(answer: Any) -> Verdict:
    """`tokens_to_hide(num_ranks, link_bytes_per_s, flops_per_s)`: 6·N·T / flops = 12·N / n / link.

    Two copies of the shard to the device, one gradient back, 4 bytes each; N cancels.
    """
    cases = ((8, 50e9, 400e12), (1, 25e9, 150e12), (64, 50e9, 400e12))
    for num_ranks, link, flops in cases:
        tokens = 2 * flops / (num_ranks * link)
        hints = {
            tokens * num_ranks: "that copies all N numbers; a rank has a shard only",
            tokens / 3: "three copies of 4 bytes: to the device twice, the gradient back once",
            tokens * 2 / 3: "three copies of 4 bytes: to the device twice, the gradient back once",
            tokens * 3: "forward and backward together are 6 FLOPs a parameter and token, not 2",
            tokens / 4: "a number takes 4 bytes",
            1 / tokens: "that is upside down: the faster the device, the more tokens it needs",
        }
        judge = partial(_one, tokens, hints)
        verdict = _call(answer, (num_ranks, link, flops), tokens, judge)
        if not verdict.is_right:
            return verdict
    return right("Whatever the model's size: more tokens a rank, or more ranks, hide the copies.")


def _one(expected: float, hints: Mapping[float, str], result: Any) -> Verdict:
    return number(result, expected, hints=hints)


def _two(expected: Mapping[str, tuple[float, Mapping[float, str]]], result: Any) -> Verdict:
    """Two named numbers, each with its hints: the first that is wrong is named."""
    if is_blank(result):
        return blank()
    if not isinstance(result, list | tuple) or len(result) != len(expected):
        return not_yet(f"two numbers are wanted, in this order: ({', '.join(expected)})")
    for (name, (value, hints)), given in zip(expected.items(), result, strict=True):
        verdict = number(given, value, hints=hints)
        if not verdict.is_right:
            return not_yet(f"{name}: {verdict.hint}")
    return right()


def _call(
    answer: Any, arguments: tuple[Any, ...], expected: Any, judge: Callable[[Any], Verdict]
) -> Verdict:
    """One call; if its result is not the expected one, `judge` says which mistake it is."""
    verdict = function(answer, [(arguments, expected)])
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    try:
        result = answer(*arguments)
    except Exception:
        return verdict  # it says what was raised
    shown = ", ".join(f"{a:g}" if isinstance(a, float) else repr(a) for a in arguments)
    return not_yet(f"with {shown}: {judge(result).hint}")


def _sharded_by(blocks_per_unit: int) -> Callable[[Any], str | None]:
    """What to run on a rank: None, or what is wrong with the learner's sharding."""

    def check(answer: Any) -> str | None:
        model = Llama(UNITS_MODEL).to(_device())
        try:
            answer(model, blocks_per_unit)
        except (TypeError, ValueError) as error:
            if isinstance(model, FSDPModule):
                return "a block of a sharded model cannot be sharded any more: the root comes last"
            if "containers" in str(error):
                return "a slice of a ModuleList is a ModuleList: make it a list first"
            raise
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return "blank"
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if whole:
            return f"nobody shards {', '.join(whole)}: who shards the root?"
        ids = torch.zeros((1, 8), dtype=torch.int64, device=_device())
        with count_collective_bytes() as counted:
            model(ids).square().mean().backward()
        units = -(-UNITS_MODEL.num_layers // blocks_per_unit)
        sums = len(counted.sizes_bytes.get("reduce_scatter", []))
        if sums == 1:
            return "everything is one unit: shard the groups of blocks first, the root last"
        if sums != units + 1:
            return f"{sums - 1} units and the root; {units} are asked for"
        unit_of = [fully_shard.state(block) for block in model.model.layers.children()]  # type: ignore[attr-defined]
        changes = sum(one is not two for one, two in pairwise(unit_of))
        return None if changes == units - 1 else "the blocks of a unit are not neighbours"

    return check


def _device() -> torch.device:
    """Where this rank's tensors have to be: its GPU under nccl."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
