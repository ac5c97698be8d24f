"""Puts every call of torch.distributed on the board, without sending anything.

    watch(board)        # dist.all_reduce(x) now leaves `all_reduce(float32[4], sum)` on the board

Only the Python functions are wrapped. What C++ calls by itself (the reducer of DDP, functional
collectives) is not seen; there the backend's own time-out and the ranks' stacks have to tell.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
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
ROOTS = ("src", "dst")


def watch(board: Board) -> None:
    """Wrap the functions of torch.distributed in this process; once is enough."""
    inside = _Inside()
    for name in COLLECTIVES:
        _replace(name, _watched, board, inside)
    for name in PEERS:
        _replace(name, _watched_peer, board, inside)


class _Inside(threading.local):
    """True while a watched call runs: what it calls in turn is not another collective.

    Each thread has its own: an asynchronous save gathers in one while another one trains.
    """

    active = False


def _replace(name: str, wrap: Callable[..., Any], board: Board, inside: _Inside) -> None:
    original = getattr(distributed_c10d, name)
    if not hasattr(original, "_labsupport_watched"):
        wrapped = wrap(original, name, board, inside)
        wrapped._labsupport_watched = True
        setattr(distributed_c10d, name, wrapped)
        setattr(dist, name, wrapped)


def _watched(function: Any, name: str, board: Board, inside: _Inside) -> Any:
    places = _places(function)
    shaped = COLLECTIVES[name]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside.active or not dist.is_initialized():
            return function(*args, **kwargs)
        group = _argument("group", places, args, kwargs) or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return function(*args, **kwargs)
        details = [_shape(_argument(shaped, places, args, kwargs))] if shaped else []
        if "op" in places:
            details.append(_operation(_argument("op", places, args, kwargs) or dist.ReduceOp.SUM))
        details += [
            f"{root}={_global_rank(root, group, places, args, kwargs, default=0)}"
            for root in ROOTS
            if root in places
        ]
        text = f"{name}({', '.join(details)})"
        members = dist.get_process_group_ranks(group)
        return _run(function, args, kwargs, board, inside, (_name(group), members, text))

    return call


def _watched_peer(function: Any, name: str, board: Board, inside: _Inside) -> Any:
    places = _places(function)
    direction = "to" if PEERS[name] == "dst" else "from"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside.active or not dist.is_initialized():
            return function(*args, **kwargs)
        group = _argument("group", places, args, kwargs) or dist.group.WORLD
        peer = _global_rank(PEERS[name], group, places, args, kwargs, default=None)
        shape = _shape(_argument("tensor", places, args, kwargs))
        text = f"{name}({shape}) {direction} rank {peer}"
        members = [dist.get_rank()] + ([peer] if isinstance(peer, int) else [])
        return _run(function, args, kwargs, board, inside, (POINT_TO_POINT, members, text))

    return call


def _run(
    function: Any,
    args: Any,
    kwargs: Any,
    board: Board,
    inside: _Inside,
    note: tuple[str, list[int], str],
) -> Any:
    """Call the function with its note on the board."""
    group, members, text = note
    slot = board.enter(group, members=members, call=text)
    inside.active = True
    try:
        result = function(*args, **kwargs)
    except BaseException:
        board.leave(slot, "failed")
        raise
    finally:
        inside.active = False
    board.leave(slot, "done")
    return result


def _places(function: Any) -> dict[str, int]:
    """Position of each parameter. Binding a signature anew at each call would take longer."""
    return {name: place for place, name in enumerate(inspect.signature(function).parameters)}


def _global_rank(
    name: str, group: Any, places: dict[str, int], args: Any, kwargs: Any, *, default: int | None
) -> int | None:
    """The root or peer as a rank of the world, whichever of its two parameters was given."""
    value = _argument(name, places, args, kwargs)
    if isinstance(value, int):
        return value
    inner = _argument(f"group_{name}", places, args, kwargs)
    return dist.get_global_rank(group, inner) if isinstance(inner, int) else default


def _argument(name: str, places: dict[str, int], args: Any, kwargs: Any) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = places[name]
    return args[place] if place < len(args) else None


def _name(group: Any) -> str:
    return "WORLD" if group is dist.group.WORLD else str(group.group_name)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _operation(op: Any) -> str:
    text = re.sub(r" object at 0x\w+", "", str(op))  # the address differs from rank to rank
    return text.rpartition(".")[2].lower().strip(" >")
