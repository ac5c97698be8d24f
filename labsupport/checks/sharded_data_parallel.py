"""Checks of notebook 07: what each stage holds and sends, units of fully_shard, offload's price.

    from labsupport.checks import sharded_data_parallel as check
    check.largest_model(most_params)
    check.units(shard_in_units, ranks)      # runs it on the ranks, counts gathers and whole bytes

Formulas are tried on numbers that the notebook does not show; what talks to ranks runs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
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
            }
            verdict = _call(answer, (stage, num_ranks, device_bytes), device_bytes / each, hints)
            if not verdict.is_right:
                return verdict
    return right("5, 8.9, 14.5 and 40 billion on 8 × 80 GB, with nothing left for activations.")


def not_divided(answer: Any) -> Verdict:
    """`(states, rest)` in GiB from two published peaks: peak(n) = states / n + rest."""
    if is_blank(answer):
        return blank()
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        return not_yet("two numbers are wanted, in parentheses: (states, rest)")
    (few, first), (many, second) = PEAKS_GIB.items()
    states = (first - second) / (1 / few - 1 / many)
    rest = first - states / few
    hints = {
        (first - second) * few: "states / 128 is small, but not nothing: subtract it as well",
        first - second: "that is the difference of the peaks: how much of the states is it?",
        rest: "that is the rest, and it comes second",
    }
    verdict = number(answer[0], states, hints=hints)
    if not verdict.is_right:
        return not_yet(f"states: {verdict.hint}") if verdict.hint else verdict
    verdict = number(answer[1], rest)
    if not verdict.is_right:
        return not_yet(f"rest: {verdict.hint}") if verdict.hint else verdict
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
    cases = []
    for num_params, num_ranks, replicas in ((4_800, 8, 2), (4_800, 16, 4), (9_600, 8, 1)):
        shapes = [ParameterShape(name="", shape=(num_params, 1))]
        plan = shard(shapes, stage="hsdp", world_size=num_ranks, replicate_size=replicas)
        held = plan.held[0].parameters_bytes
        across = sum(one.link_bytes for one in plan.exchanges if one.collective == "all_reduce")
        cases.append(((num_params, num_ranks, replicas), (4 * held, across)))
    return function(
        answer,
        cases,
        hint="How many ranks divide one copy? And what is left of a gradient after the "
        "reduce-scatter inside the group, when it goes into the all-reduce of 2(r − 1)/r?",
        why="Only 1/(ranks of a group) of the gradients ever leaves the group.",
    )


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
        }
        verdict = _call(answer, (num_ranks, link, flops), tokens, hints)
        if not verdict.is_right:
            return verdict
    return right("Whatever the model's size: more tokens a rank, or more ranks, hide the copies.")


def _call(
    answer: Any, arguments: tuple[Any, ...], expected: float, hints: dict[float, str]
) -> Verdict:
    """One call, its result compared with `number` for the hint of a known mistake."""
    verdict = function(answer, [(arguments, expected)])
    if verdict.status != "not yet" or not callable(answer):
        return verdict
    try:
        result = answer(*arguments)
    except Exception:
        return verdict  # it says what was raised
    hint = number(result, expected, hints=hints).hint
    shown = ", ".join(f"{a:g}" if isinstance(a, float) else repr(a) for a in arguments)
    return not_yet(f"with {shown}: {hint}")


def _sharded_by(blocks_per_unit: int) -> Callable[[Any], str | None]:
    """What to run on a rank: None, or what is wrong with the learner's sharding."""

    def check(answer: Any) -> str | None:
        model = Llama(UNITS_MODEL).to(_device())
        answer(model, blocks_per_unit)
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return "blank"
        whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if whole:
            return f"{whole[0]} and {len(whole) - 1} more are not sharded: who shards the root?"
        ids = torch.zeros((1, 8), dtype=torch.int64, device=_device())
        with count_collective_bytes() as counted:
            model(ids).square().mean().backward()
        units = -(-UNITS_MODEL.num_layers // blocks_per_unit)
        sums = len(counted.sizes_bytes.get("reduce_scatter", []))
        if sums == units + 1:
            return None
        if sums == 1:
            return "everything is one unit: shard the groups of blocks first, the root last"
        return f"{sums - 1} units and the root; {units} are asked for"

    return check


def _device() -> torch.device:
    """Where this rank's tensors have to be: its GPU under nccl."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
