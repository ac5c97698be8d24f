"""Puts every call of torch.distributed on the board, without sending anything.

    watch(board)        # dist.all_reduce(x) now leaves `all_reduce(float32[4], sum)` on the board

Only the Python functions are wrapped. What C++ calls by itself (the reducer of DDP, functional
collectives) is not seen; there the backend's own time-out and the ranks' stacks have to tell.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labsupport.ranks.board import POINT_TO_POINT, Board

# Operation -> the argument whose shape has to be the same on every rank (None: may differ).
COLLECTIVES: dict[str, str | None] = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": None,
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "all_to_all": None,
    "all_to_all_single": None,
    "barrier": None,
    "broadcast": "tensor",
    "broadcast_object_list": None,
    "gather": "tensor",
    "gather_object": None,
    "monitored_barrier": None,
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output",
    "scatter": "tensor",
    "scatter_object_list": None,
}
PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
ROOTS = ("src", "dst", "group_src", "group_dst")


def watch(board: Board) -> None:
    """Wrap the functions of torch.distributed in this process; once is enough."""
    inside = _Inside()
    for name in COLLECTIVES:
        _replace(name, _watched, board, inside)
    for name in PEERS:
        _replace(name, _watched_peer, board, inside)


class _Inside:
    """True while a watched call runs: what it calls in turn is not another collective."""

    active = False


def _replace(name: str, wrap: Callable[..., Any], board: Board, inside: _Inside) -> None:
    original = getattr(distributed_c10d, name)
    if not hasattr(original, "_labsupport_watched"):
        wrapped = wrap(original, name, board, inside)
        wrapped._labsupport_watched = True
        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)


def _watched(function: Any, name: str, board: Board, inside: _Inside) -> Any:
    signature = inspect.signature(function)
    shaped = COLLECTIVES[name]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside.active or not dist.is_initialized():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments  # a wrong call fails here, as it should
        group = bound.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return function(*args, **kwargs)
        details = [_shape(bound.get(shaped))] if shaped else []
        if "op" in bound or "op" in signature.parameters:
            details.append(_operation(bound.get("op", dist.ReduceOp.SUM)))
        details += [f"{root}={bound[root]}" for root in ROOTS if bound.get(root) is not None]
        text = f"{name}({', '.join(details)})"
        inside.active = True
        try:
            with board.note(_name(group), members=dist.get_process_group_ranks(group), call=text):
                return function(*args, **kwargs)
        finally:
            inside.active = False

    return call


def _watched_peer(function: Any, name: str, board: Board, inside: _Inside) -> Any:
    signature = inspect.signature(function)
    direction = "to" if PEERS[name] == "dst" else "from"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside.active or not dist.is_initialized():
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        peer = bound.get(PEERS[name])
        text = f"{name}({_shape(bound.get('tensor'))}) {direction} rank {peer}"
        members = [dist.get_rank()] + ([peer] if isinstance(peer, int) else [])
        inside.active = True
        try:
            with board.note(POINT_TO_POINT, members=members, call=text):
                return function(*args, **kwargs)
        finally:
            inside.active = False

    return call


def _name(group: Any) -> str:
    return "WORLD" if group is dist.group.WORLD else str(group.group_name)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _operation(op: Any) -> str:
    return str(op).rpartition(".")[2].lower().strip(" >")
