"""In which type is everything of a training step really kept? Read off the tensors, not the recipe.

    model, optimizer = ...                                # fp32, autocast to bf16
    table = kept_types(model, optimizer, batch, precision=Precision.named("bf16"))
    table["parameters"].dtypes, table["linear layers"].dtypes      # ('float32',), ('bfloat16',)
    table["activations"].num_bytes                        # by type: {'float32': …, 'bfloat16': …}

One real step is made. Outputs are seen by hooks on the modules and on every operator; what the
forward pass leaves for the backward pass is seen where autograd packs it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.data import Batch
from labsupport.model import Block, Llama, RMSNorm, token_loss
from labsupport.results import format_value
from labsupport.train.gradients import gradient_norm
from labsupport.train.precision import Precision

_CASTS = {"_to_copy", "div", "clamp", "t", "view", "_unsafe_view"}
"""Operators by which a weight becomes its narrow copy."""
_INSIDE = {
    "attention": ("_scaled_dot_product",),
    "norms, inside": ("rsqrt", "mean"),
    "log-softmax": ("_log_softmax",),
}


@dataclass(frozen=True)
class Kept:
    """One line of the table."""

    what: str
    num_bytes: Mapping[str, int]
    """Bytes in each type. For the outputs of operators these are the types only, with 0 bytes."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the types, the one with most bytes first."""
        return tuple(sorted(self.num_bytes, key=lambda name: (-self.num_bytes[name], name)))

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


@dataclass(frozen=True, repr=False)
class KeptTypes:
    """The table; shows itself as text or HTML, and `table["gradients"]` is a line of it."""

    precision: str
    kept: tuple[Kept, ...]
    """Memory between operators, with bytes."""
    outputs: tuple[Kept, ...]
    """What operators return, and a few that compute inside another's type."""

    def __getitem__(self, what: str) -> Kept:
        return next(line for line in (*self.kept, *self.outputs) if line.what == what)

    def rows(self) -> list[tuple[str, str, str]]:
        """What, type, bytes."""
        lines = [("kept in memory", "type", self.precision)]
        lines += [(k.what, _by_type(k), format_value(k.total_bytes, "bytes")) for k in self.kept]
        lines.append(("computed", "", ""))
        return lines + [(line.what, ", ".join(line.dtypes), "") for line in self.outputs]

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        def line(row: tuple[str, str, str]) -> str:
            cell = "td" if row[1] and row[1] != "type" else "th"
            inside = "".join(
                f"<{cell} style='text-align:{side}'>{html.escape(text)}</{cell}>"
                for text, side in zip(row, ("left", "left", "right"), strict=True)
            )
            return f"<tr>{inside}</tr>"

        return f"<table><tbody>{''.join(map(line, self.rows()))}</tbody></table>"


def kept_types(
    model: Llama, optimizer: torch.optim.Optimizer, batch: Batch, *, precision: Precision
) -> KeptTypes:
    """Make one step on `batch` (the weights change), and tell the type of everything in it."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    operators, saved = _Operators(weights), _Saved(weights)
    device = next(model.parameters()).device
    input_ids, labels = batch.input_ids.to(device), batch.labels.to(device)
    with _outputs_of(model) as outputs, saved.watching():
        with operators, precision.autocast():
            logits = model(input_ids)
        with operators:
            loss = token_loss(logits, labels).mean
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    copies, activations = saved.split(operators.narrow_weights)
    kept = {
        "parameters": _count(model.parameters()),
        "gradients": _count(gradients),
        "optimizer moments": _count(moments),
        "narrow copies of weights": copies,
        "activations": activations,
        "logits": _count([logits]),
    }
    seen = {
        **outputs,
        **{what: operators.types_of(names) for what, names in _INSIDE.items()},
        "loss": {_name(loss): 0},
        "gradient norm": {_name(gradient_norm(gradients)): 0},
    }
    optimizer.zero_grad(set_to_none=True)
    return KeptTypes(
        precision.name,
        tuple(Kept(what, sizes) for what, sizes in kept.items()),
        tuple(Kept(what, sizes) for what, sizes in seen.items()),
    )


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Types of the outputs of every operator, after autocast; and which are copies of weights."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[str, set[str]] = {}
        self._from_weights = set(weights)
        self._alive: list[Tensor] = []  # so that no address is given twice
        self.narrow_weights: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        name = func.overloadpacket.__name__
        if isinstance(first, Tensor):
            self._seen.setdefault(name, set()).add(_name(first))
            if name in _CASTS and _address(args[0]) in self._from_weights:
                self._from_weights.add(_address(first))
                self.narrow_weights.add(_address(first))
                self._alive.append(first)
        return out

    def types_of(self, beginnings: Iterable[str]) -> dict[str, int]:
        return {
            dtype: 0
            for name, dtypes in self._seen.items()
            if name.startswith(tuple(beginnings))
            for dtype in sorted(dtypes)
        }


class _Saved:
    """What autograd keeps for the backward pass: every storage once, the weights left out."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._tensors: dict[int, Tensor] = {}

    def watching(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if _address(tensor) not in self._weights:
            self._tensors.setdefault(_address(tensor), tensor)
        return tensor

    def split(self, copies: set[int]) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by type of copies of weights, and of the activations."""
        ours = [t for address, t in self._tensors.items() if address in copies]
        others = [t for address, t in self._tensors.items() if address not in copies]
        return _count(ours), _count(others)


@contextmanager
def _outputs_of(model: Llama) -> Iterator[dict[str, dict[str, int]]]:
    """Inside: the types of what the model's kinds of modules return, by the kind's name."""
    inner = [module for block in model.model.layers for module in block.modules()]
    kinds: dict[str, list[nn.Module]] = {
        "embedding": [model.model.embed_tokens],
        "linear layers": [module for module in inner if isinstance(module, nn.Linear)],
        "norms": [module for module in inner if isinstance(module, RMSNorm)],
        "residual stream": [module for module in inner if isinstance(module, Block)],
    }
    seen: dict[str, dict[str, int]] = {kind: {} for kind in kinds}

    def note(kind: str, module: nn.Module, args: Any, output: Tensor) -> None:
        seen[kind][_name(output)] = 0

    handles = [
        module.register_forward_hook(partial(note, kind))
        for kind, modules in kinds.items()
        for module in modules
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _count(tensors: Iterable[Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        sizes[_name(tensor)] = sizes.get(_name(tensor), 0) + size
    return sizes


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_type(line: Kept) -> str:
    if len(line.num_bytes) < 2:
        return ", ".join(line.dtypes) or "none"
    sizes = line.num_bytes
    return ", ".join(f"{name} {format_value(sizes[name], 'bytes')}" for name in line.dtypes)
