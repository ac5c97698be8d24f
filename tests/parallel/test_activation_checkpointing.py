"""Activation checkpointing: the same gradients to the bit, fewer bytes kept, blocks run again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint

from labsupport.config import ModelConfig, Recompute
from labsupport.model import Llama
from labsupport.parallel.activation_checkpointing import (
    ATTENTION,
    COSTLY,
    MATMULS,
    checkpoint_activations,
)
from labsupport.parallel.offload import run_with_host_copies

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
)
INPUT_IDS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
LABELS = INPUT_IDS.roll(-1, dims=1)

Recipe = Callable[[Llama], Llama]


def recipe(text: str) -> Recipe:
    return lambda model: checkpoint_activations(model, Recompute.parse(text))


def host_copies(model: Llama) -> Llama:
    """What offload does on a GPU, here from host memory to host memory."""
    for block in model.model.layers:
        block.forward = partial(run_with_host_copies, block.forward)
    return model


RECIPES: dict[str, Recipe] = {
    **{text: recipe(text) for text in ("full", "every-2", "every-3", "selective")},
    "host copies": host_copies,
}


def gradients(
    model: Llama, *, bf16: bool = False, run: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Of one forward and backward with the same random numbers each time, by parameter name."""
    torch.manual_seed(7)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        logits = (model if run is None else run)(INPUT_IDS)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), LABELS.flatten())
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_same(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(given) == list(wanted)
    for name, gradient in given.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_equal_to_the_bit(name: str, dropout: float, bf16: bool) -> None:
    wanted = gradients(Llama(CONFIG, dropout=dropout), bf16=bf16)
    model = RECIPES[name](Llama(CONFIG, dropout=dropout))
    assert_same(gradients(model, bf16=bf16), wanted)


def test_random_state_that_is_lost_is_noticed() -> None:
    wanted = gradients(Llama(CONFIG, dropout=0.2))
    model = Llama(CONFIG, dropout=0.2)
    for block in model.model.layers:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    with pytest.raises(AssertionError, match=r"model\."):
        assert_same(gradients(model), wanted)


def test_tied_embeddings_too() -> None:
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True})
    assert_same(gradients(recipe("full")(Llama(config))), gradients(Llama(config)))


# ---- what is kept, what is run again -----------------------------------------------------------


class _Storages(TorchDispatchMode):
    """Remembers every storage that an operator made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out


def kept_bytes(model: Llama) -> int:
    """What the forward pass leaves alive for the backward, besides weights and logits."""
    with _Storages() as storages:
        logits = model(INPUT_IDS)
    for known in (logits, *model.parameters()):
        storages.made.pop(known.untyped_storage()._cdata, None)
    return sum(size for ref, size in storages.made.values() if not ref.expired())


def blocks_run_again(model: Llama) -> int:
    seen: list[int] = []
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(lambda *_: seen.append(1))
    gradients(model)
    return len(seen) - CONFIG.num_layers


def test_fewer_bytes_are_kept() -> None:
    names = ("none", "full", "every-2", "every-3", "selective")
    kept = {name: kept_bytes(recipe(name)(Llama(CONFIG))) for name in names}
    input_bytes = INPUT_IDS.numel() * CONFIG.hidden_size * 4
    # full: an input a block; the last block's output, for the last norm; what that norm keeps.
    assert (CONFIG.num_layers + 1) * input_bytes <= kept["full"] < 9 * input_bytes
    assert kept["full"] < kept["selective"] < kept["none"]
    # Half of the blocks give half of what all give. Of 4 blocks, 2 are every third: 0 and 3.
    assert kept["every-2"] == kept["every-3"] == (kept["none"] + kept["full"]) / 2


def test_selective_keeps_what_is_costly_and_only_that() -> None:
    model = Llama(CONFIG)
    full = kept_bytes(recipe("full")(model))
    config, tokens = CONFIG, INPUT_IDS.numel()
    width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    matmuls = width + 2 * kv_width + 2 * config.hidden_size + 2 * config.intermediate_size
    attention = width + config.num_heads  # and a row of log-sums
    sizes = {MATMULS: matmuls, ATTENTION: attention, COSTLY: matmuls + attention}
    for keep, numbers_a_token in sizes.items():
        checkpoint_activations(model, Recompute(mode="selective"), keep=keep)
        assert kept_bytes(model) - full == config.num_layers * tokens * numbers_a_token * 4


@pytest.mark.parametrize(
    ("text", "again"), [("none", 0), ("full", 4), ("every-2", 2), ("every-3", 2), ("every-9", 1)]
)
def test_as_many_blocks_run_again_as_were_chosen(text: str, again: int) -> None:
    assert blocks_run_again(recipe(text)(Llama(CONFIG))) == again


def test_nothing_is_kept_or_run_again_without_gradients() -> None:
    model = recipe("full")(Llama(CONFIG))
    with torch.no_grad():
        assert torch.equal(model(INPUT_IDS), Llama(CONFIG)(INPUT_IDS))
        assert kept_bytes(model) == 0


def test_host_copies_leave_weights_and_copy_once() -> None:
    """Three projections save the same norm's output: one copy. Weights stay where they are."""

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return torch.stack([linear(y) for linear in self.linears]).sum()

    fan, x = Fan(), torch.randn(5, 8, requires_grad=True)
    with _Storages() as storages:
        loss = run_with_host_copies(fan, x)
    for weight in fan.parameters():
        storages.made.pop(weight.untyped_storage()._cdata, None)
    alive = [size for ref, size in storages.made.values() if not ref.expired()]
    # Copies of x, of y, of the norm's mean and 1 / spread; and the loss.
    assert sorted(alive) == [4, 20, 20, 160, 160]
    loss.backward()
    assert x.grad is not None


# ---- the rest of the world ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["full", "selective"])
def test_names_copies_and_switching_off(text: str) -> None:
    plain = Llama(CONFIG)
    wanted = gradients(plain)
    model = recipe(text)(Llama(CONFIG))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    twin = copy.deepcopy(model)
    assert_same(gradients(twin), wanted)
    assert all(param.grad is None for param in model.parameters())  # the twin runs its own blocks
    assert kept_bytes(recipe("none")(model)) == kept_bytes(plain)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("text", ["full", "selective"])
def test_under_ddp(group_of_one: None, text: str, static_graph: bool) -> None:
    model = recipe(text)(Llama(CONFIG, dropout=0.2))
    wrapped = DistributedDataParallel(model, static_graph=static_graph)
    wanted = gradients(Llama(CONFIG, dropout=0.2))
    for _ in range(2):
        assert_same(gradients(model, run=wrapped), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("text", ["full", "selective"])
def test_torch_compile_takes_it_whole(text: str) -> None:
    torch._dynamo.reset()
    model = recipe(text)(Llama(CONFIG))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given, wanted = gradients(model, run=compiled), gradients(Llama(CONFIG))
    for name, gradient in given.items():
        assert torch.allclose(gradient, wanted[name], atol=1e-6), name


def test_a_recomputation_of_another_shape_is_an_error() -> None:
    """torch's own check, which notebook 05 shows: sizes are compared, values are not."""
    lengths = iter((24, 16))

    def cut(x: Tensor) -> Tensor:
        return x[:, : next(lengths)].sin().sin()

    out = checkpoint(cut, torch.randn(2, 24, requires_grad=True), use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        out.sum().backward()


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'offload' .* host memory already; use 'selective'"):
        checkpoint_activations(Llama(CONFIG), Recompute(mode="offload"))
    with pytest.raises(ValueError, match=r"Linear has no model\.layers"):
        checkpoint_activations(nn.Linear(2, 2), Recompute(mode="full"))
