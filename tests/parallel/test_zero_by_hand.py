"""ZeRO by hand: equal to one process, for any module and optimizer, and in bytes to the formula."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from labsupport import RankError, Ranks
from labsupport.checkpoint import full_state_dict
from labsupport.config import ModelConfig, TrainConfig
from labsupport.measure.collective_bytes import count_collective_bytes
from labsupport.model import Llama
from labsupport.parallel.layout import Layout
from labsupport.parallel.zero import full_parameters, zero1, zero2, zero3
from labsupport.parallel.zero.stage3 import blocks_of
from labsupport.plan.parameter_shapes import shapes_of
from labsupport.train.optimizer import build_optimizer
from labsupport.train.proof import RankProof, compare, prove_on_rank
from labsupport.train.proof_run import (
    PROOF_CONFIG,
    PROOF_MODEL,
    build,
    proof_batches,
    train_alone,
    train_in,
)
from labsupport.train.step import train_step

STAGES: dict[str, Any] = {"zero1": zero1, "zero2": zero2, "zero3": zero3}
TIED = replace(PROOF_MODEL, tie_word_embeddings=True)
UNEVEN = replace(PROOF_MODEL, vocab_size=67, intermediate_size=49, hidden_size=36)
every_stage = pytest.mark.parametrize("stage", STAGES)


# ---- equal to one process ----------------------------------------------------------------------


def all_stages(model: ModelConfig, config: TrainConfig) -> dict[str, RankProof]:
    """On a rank: its proof of each stage, against one run of the oracle."""
    layout = Layout.of_group(dist.group.WORLD)
    case: dict[str, Any] = {"model": model, "config": config, "steps": 3}
    oracle = train_alone(dp_size=layout.dp_size, **case)
    runs = {name: train_in(layout, wrap, **case) for name, wrap in STAGES.items()}
    return {name: compare(run, oracle, layout=layout) for name, run in runs.items()}


def alone(model: Llama, wrap: Any) -> Any:
    """The same recipe on a mesh of this rank only."""
    shape = (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return wrap(model, mesh["dp_shard"], compute_dtype=torch.bfloat16)


def in_bf16(stage: str, **settings: Any) -> RankProof:
    """Half the arithmetic changes, so the oracle is the same on one rank."""
    wrap = STAGES[stage]
    bf16 = partial(wrap, compute_dtype=torch.bfloat16)
    return prove_on_rank(bf16, wrap_alone=partial(alone, wrap=wrap), **settings)


def prove(ranks: Ranks, model: ModelConfig, recompute: str) -> None:
    config = replace(PROOF_CONFIG, activation_checkpointing=recompute)
    for proofs in ranks.run(all_stages, model, config):
        assert not {name: one for name, one in proofs.items() if not one.is_equal}


@pytest.mark.parametrize(
    ("model", "recompute"), [(PROOF_MODEL, "none"), (TIED, "full"), (UNEVEN, "selective")]
)
def test_two_ranks(two: Ranks, model: ModelConfig, recompute: str) -> None:
    prove(two, model, recompute)


def test_four_ranks(four: Ranks) -> None:
    prove(four, TIED, "full")


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(world_size: int) -> None:
    with Ranks(world_size, device="cpu", threads_per_rank=1, collective_timeout_s=20) as ranks:
        prove(ranks, UNEVEN, "none")


@every_stage
def test_bf16_with_fp32_shards_and_sums(two: Ranks, stage: str) -> None:
    config = replace(PROOF_CONFIG, activation_checkpointing="full")
    proofs = two.run(in_bf16, stage, model=TIED, config=config)
    assert all(one.is_equal for one in proofs), proofs


# ---- any module --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Everything that is not a Llama: see the comments."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True)  # keeps its parameters in a list of its own
        self.norm = nn.BatchNorm1d(6).eval()  # buffers, one of them an integer
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)  # the last trained one: others would wait for it
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 5), nn.GELU())])
        self.layers.append(nn.Linear(5, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))  # no row at all
        self.shift = nn.Parameter(torch.zeros(1))  # fewer rows than ranks
        self.turned = nn.Parameter(torch.randn(7, 6).t())  # not contiguous
        self.table = nn.Parameter(torch.arange(9), requires_grad=False)  # not a float
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight  # shared
        self.sometimes = nn.Parameter(torch.ones(6))

    def forward(self, ids: Tensor, *, factor: Tensor, uses_all: bool) -> Mapping[str, Any]:
        h, _ = self.rnn(self.embed(ids))
        h = h + self.frozen(h)
        narrow = h
        for layer in (*self.layers, *self.layers):  # each is used twice
            x = checkpoint(layer, h if layer is not self.layers[2] else narrow, use_reentrant=False)
            h, narrow = (h + x, narrow) if x.shape == h.shape else (h, x)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        h = h * self.scale + self.shift + h @ self.turned @ self.turned.t() / 7
        h = h * self.sometimes if uses_all else h
        return {"logits": self.head(h * factor), "nothing": None}


def odd_losses(
    model: nn.Module, step: int, ranks: range, *, alike: bool
) -> list[Callable[[], Tensor]]:
    """Two micro batches of each rank; not in each step, and if not `alike` only rank 0 uses all."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (dist.get_world_size(), 2, 3, 5), generator=generator)

    def loss(rank: int, micro: int) -> Tensor:
        uses_all = step != 1 and (alike or rank == 0)
        out = model(ids[rank, micro], factor=torch.ones(()), uses_all=uses_all)
        return F.cross_entropy(out["logits"].float().flatten(0, 1), ids[rank, micro].flatten())

    return [partial(loss, rank, micro) for rank in ranks for micro in range(2)]


def differences(stage: str, build_optimizer: Callable[[Any], optim.Optimizer]) -> float:
    """On a rank: the largest, over three steps of a plain loop, from one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    oracle, model = Odd(seed=0), STAGES[stage](Odd(seed=rank))
    alike = stage == "zero3"
    pairs = [(net, build_optimizer(net.parameters())) for net in (oracle, model)]
    for step in range(3):
        for loss in odd_losses(oracle, step, range(world_size), alike=alike):
            (loss() / world_size).backward()  # type: ignore[no-untyped-call]
        first, last = odd_losses(model, step, range(rank, rank + 1), alike=alike)
        with model.no_sync():
            first().backward()  # type: ignore[no-untyped-call]
        last().backward()  # type: ignore[no-untyped-call]
        for _, optimizer in pairs:
            optimizer.step()
        with torch.inference_mode():
            last()  # an optimizer has just moved the rows
        for _, optimizer in pairs:
            optimizer.zero_grad()
    whole, want = full_parameters(model), dict(oracle.named_parameters())
    assert whole.keys() == want.keys()
    return max((whole[name] - want[name]).abs().max().item() for name in want)


OPTIMIZERS: list[Callable[[Any], optim.Optimizer]] = [
    partial(optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    partial(optim.AdamW, lr=1e-2, eps=1e-4, foreach=False),
    partial(optim.Adam, lr=1e-2, eps=1e-4, amsgrad=True),
    partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(optim.Adagrad, lr=1e-2, eps=1e-4),
    partial(optim.RMSprop, lr=1e-2, eps=1e-4, centered=True),
    partial(optim.NAdam, lr=1e-2, eps=1e-4),
    partial(optim.RAdam, lr=1e-2, eps=1e-4),
    partial(optim.Adamax, lr=1e-2, eps=1e-4),
    partial(optim.Adadelta, lr=1e-1, eps=1e-4),
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_module_and_any_optimizer(two: Ranks, kind: Any) -> None:
    assert max(two.run(differences, "zero2", kind)) < 1e-5


@every_stage
def test_any_module_in_every_stage(four: Ranks, stage: str) -> None:
    assert max(four.run(differences, stage, OPTIMIZERS[0])) < 1e-5


def test_optimizers_that_torch_has_no_rule_for_stop(two: Ranks) -> None:
    for kind in (optim.Adafactor, optim.Rprop, partial(optim.SGD, fused=True)):
        with pytest.raises(RankError, match=r"DTensor|sharding|placement"):
            two.run(differences, "zero1", kind)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_ranks_may_use_different_parameters(two: Ranks, stage: str) -> None:
    def on_rank() -> list[Tensor | None]:
        heads = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("a", "b", "none")})
        nn.init.ones_(heads["a"].weight)
        model = STAGES[stage](Pick(heads))
        model(torch.ones(1, 4), "ab"[dist.get_rank()]).sum().backward()
        grads = [head.weight.grad for head in heads.values()]
        return [None if g is None else g.full_tensor() for g in grads]

    for a, b, none in two.run(on_rank):
        assert torch.equal(a, torch.full((4, 4), 0.5))
        assert torch.equal(b, a)
        assert none is None


class Pick(nn.Module):
    def __init__(self, heads: nn.ModuleDict) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor, name: str = "a") -> Any:
        return self.heads[name](x)


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    llama = Llama(PROOF_MODEL)
    assert list(blocks_of(llama)) == list(llama.model.layers)
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2))])
    assert list(blocks_of(nested)) == [nested[0][0], nested[1]]
    assert list(blocks_of(nn.Linear(2, 2))) == []


# ---- what is sent, and what is held --------------------------------------------------------------


def sent_bytes(stage: str, dtype: torch.dtype | None) -> dict[str, int]:
    """On a rank: handed to collectives in the third step of two micro batches."""
    model = STAGES[stage](build(UNEVEN, PROOF_CONFIG, seed=0), compute_dtype=dtype)
    optimizer, rank = build_optimizer(model, PROOF_CONFIG), dist.get_rank()
    batches = proof_batches(0, config=PROOF_CONFIG, world_size=dist.get_world_size())
    mine = batches[2 * rank :][:2]
    for step in range(3):
        with count_collective_bytes() as counted:
            train_step(
                model, optimizer, mine, config=PROOF_CONFIG, step=step, group=dist.group.WORLD
            )
    return {name: sum(sizes) for name, sizes in counted.sizes_bytes.items()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bytes_sent_are_those_of_the_formula(two: Ranks, dtype: torch.dtype | None) -> None:
    shapes, width = shapes_of(UNEVEN), 4 if dtype is None else 2
    padded = {s: -(-s.shape[0] // 2) * 2 * s.numel // s.shape[0] for s in shapes}
    whole, root = sum(padded.values()), sum(padded[s] for s in shapes if not s.unit)
    assert whole > UNEVEN.num_params  # 67 and 49 rows are filled up to 68 and 50
    twice = 2 * (whole + whole - root)  # micro batches × (forward, and the blocks in backward too)
    for stage, gathered in (("zero1", whole), ("zero2", whole), ("zero3", twice)):
        for counted in two.run(sent_bytes, stage, dtype):
            assert counted["reduce_scatter"] == 4 * whole  # sums are fp32
            assert counted["allgather"] == width * gathered + 2 * 24  # train_step's three numbers
            assert counted["allreduce"] == len(shapes) + 8  # which are used: a byte; and |g|


@every_stage
def test_without_no_sync_every_backward_sends_and_the_sum_is_the_same(
    two: Ranks, stage: str
) -> None:
    def on_rank() -> tuple[int, int, float]:
        found = []
        for pause in (True, False):
            model = STAGES[stage](Llama(PROOF_MODEL))
            with count_collective_bytes() as counted:
                for i, ids in enumerate(torch.arange(24).view(3, 1, 8)):
                    with model.no_sync() if pause and i < 2 else nullcontext():
                        model(ids).logsumexp(-1).mean().backward()
            grads = [param.grad.full_tensor() for param in model.parameters()]
            found.append((counted.gradient_bytes, torch.cat([g.flatten() for g in grads])))
        (once, grads), (thrice, others) = found
        return once, thrice, (grads - others).abs().max().item()

    for once, thrice, difference in two.run(on_rank):
        assert thrice == 3 * once
        assert difference < 1e-6


@every_stage
def test_all_under_no_sync_is_sent_by_finish(two: Ranks, stage: str) -> None:
    def on_rank() -> list[bool]:
        model = STAGES[stage](nn.Linear(4, 4))
        with model.no_sync(), count_collective_bytes() as counted:
            model(torch.ones(1, 4)).sum().backward()
            nothing = counted.gradient_bytes == 0
        model.finish_gradient_sync()
        model.finish_gradient_sync()  # nothing is owed any more
        return [nothing, torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4))]

    assert two.run(on_rank) == [[True, True]] * 2


def largest_gradients(model: Any, batch: Tensor) -> float:
    """Bytes of gradients that this rank holds at most in a backward; 1 is all of them whole."""
    pieces, seen = model.no_sync.__self__.pieces, [0]

    def look(*_: Any) -> None:
        held = [g for p in pieces for g in (p.pending, p.received) if g is not None]
        seen.append(sum(g.untyped_storage().nbytes() for g in held))

    hooks = [module.register_full_backward_hook(look) for module in model.modules()]
    model(batch).sum().backward()
    for hook in hooks:
        hook.remove()
    return max(seen) / sum(4 * param.numel() for param in model.parameters())


def test_gradients_leave_during_the_backward(two: Ranks) -> None:
    """Stage 1 ends it with all of them whole; 2 and 3 hold half, and some of a block."""

    def on_rank(stage: str) -> float:
        model = STAGES[stage](Llama(replace(PROOF_MODEL, num_layers=6)))
        return largest_gradients(model, torch.zeros(1, 8, dtype=torch.long))

    assert two.run(on_rank, "zero1")[0] > 0.9
    for stage in ("zero2", "zero3"):
        assert 0.4 < two.run(on_rank, stage)[0] < 0.65


def test_gradients_wait_for_an_unused_parameter_only_once(two: Ranks) -> None:
    def on_rank() -> tuple[float, float]:
        inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        model = zero2(Pick(nn.ModuleDict({"a": inner, "unused": nn.Linear(2, 2)})))
        first, second = (largest_gradients(model, torch.ones(1, 8)) for _ in range(2))
        return first, second

    for first, second in two.run(on_rank):
        assert first > 0.8
        assert second < 0.65


def test_whole_weights_of_a_block_exist_while_it_runs(two: Ranks) -> None:
    def on_rank() -> set[tuple[bool, ...]]:
        model = zero3(Llama(PROOF_MODEL))
        units = model.no_sync.__self__.units
        seen = set()

        def look(*_: Any) -> None:
            seen.add(tuple(not unit.pieces[0].is_free for unit in units))

        for block in model.model.layers:
            block.mlp.register_forward_hook(look)
            block.mlp.register_full_backward_hook(look)
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        look()
        return seen

    root_and_one = {(True, True, False), (True, False, True)}
    assert two.run(on_rank) == [root_and_one | {(False, False, False)}] * 2


# ---- the model stays what it was -----------------------------------------------------------------


@every_stage
def test_same_object_same_names_shards_of_rank_0(four: Ranks, stage: str) -> None:
    def on_rank() -> None:
        plain, given = Llama(UNEVEN, seed=0), Llama(UNEVEN, seed=dist.get_rank())
        model = STAGES[stage](given)
        assert model is given
        assert type(model) is Llama
        assert list(model.state_dict()) == list(plain.state_dict())
        for name, param in model.named_parameters():
            assert isinstance(param, nn.Parameter)
            assert isinstance(param, DTensor)
            assert param.placements == (Shard(0),)
            want = plain.get_parameter(name)
            rows = want.chunk(4)[dist.get_rank()] if want.shape[0] else want
            assert torch.equal(param.to_local(), rows)
        for name, whole in full_parameters(model).items():
            assert torch.equal(whole, plain.get_parameter(name))

    four.run(on_rank)


@every_stage
def test_whole_weights_out_and_in(two: Ranks, stage: str) -> None:
    def on_rank() -> None:
        ids, other = torch.arange(8).view(1, 8), Llama(TIED, seed=5)
        model = STAGES[stage](Llama(TIED), compute_dtype=torch.bfloat16)
        with torch.no_grad():
            model(ids)
            model.load_state_dict(other.state_dict())
            logits, want = model(ids).float(), other(ids)
        assert (logits - want).abs().max() < 0.03 * want.abs().max()  # not those of before
        state, want_state = full_state_dict(model), other.state_dict()
        if dist.get_rank() == 0:
            assert state.keys() == want_state.keys()
            assert all(torch.equal(state[name], want_state[name]) for name in state)  # fp32
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(Llama(UNEVEN).state_dict())

    two.run(on_rank)


@every_stage
def test_a_failure_leaves_the_shards_in_place(two: Ranks, stage: str) -> None:
    def on_rank() -> None:
        model, ids = STAGES[stage](Llama(PROOF_MODEL)), torch.arange(8).view(1, 8)
        with pytest.raises(ValueError, match="must be"):
            model(ids[0])
        assert all(isinstance(param, DTensor) for param in model.parameters())
        hook = model.model.norm.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids).sum().backward()
        hook.remove()
        model(ids).sum().backward()
        plain = Llama(PROOF_MODEL)
        plain(ids).sum().backward()
        for name, param in model.named_parameters():
            want = plain.get_parameter(name).grad
            assert torch.allclose(param.grad.full_tensor(), want, atol=1e-3, rtol=1e-4)

    two.run(on_rank)


def test_a_model_that_is_thrown_away_is_freed(two: Ranks) -> None:
    def on_rank() -> bool:
        model = zero2(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        weight = weakref.ref(model.no_sync.__self__.pieces[0].buffer)
        del model
        gc.collect()
        return weight() is None

    assert two.run(on_rank) == [True, True]


# ---- refused -------------------------------------------------------------------------------------


def test_an_optimizer_built_before_is_refused(two: Ranks) -> None:
    def on_rank(stage: str) -> None:
        model = Llama(PROOF_MODEL)
        optimizer = build_optimizer(model, PROOF_CONFIG)
        batches = proof_batches(0, config=PROOF_CONFIG, world_size=1)
        with pytest.raises(ValueError, match="after the model is wrapped or sharded"):
            train_step(STAGES[stage](model), optimizer, batches, config=PROOF_CONFIG, step=0)

    for stage in STAGES:
        two.run(on_rank, stage)


def test_what_cannot_be_sharded_is_refused(two: Ranks) -> None:
    def on_rank() -> None:
        with torch.device("meta"):
            meta = nn.Linear(2, 2)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        cases: list[tuple[str, Any]] = [
            ("no parameters", lambda: zero1(nn.ReLU())),
            ("meta device", lambda: zero2(meta)),
            ("a shard already", lambda: zero3(zero3(nn.Linear(2, 2)))),
            ("has 2 axes", lambda: zero1(nn.Linear(2, 2), mesh)),
            ("no type to compute in", lambda: zero1(nn.Linear(2, 2), compute_dtype=torch.int8)),
        ]
        for message, make in cases:
            with pytest.raises(ValueError, match=message):
                make()

    two.run(on_rank)


def test_an_output_without_a_tensor_is_refused(two: Ranks) -> None:
    class Wordy(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {super().forward(x)}  # a set: nobody looks inside

    with pytest.raises(RankError, match="Wordy returned set"):
        two.run(lambda: zero1(Wordy(2, 2))(torch.ones(1, 2)))
