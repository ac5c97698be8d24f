"""Functions, arguments and results on their way between the notebook and its ranks.

    payload = dump_call(lambda x: x + n, (1,), {})        # closures and lambdas included
    result = load(dump_result(tensor))                    # tensors arrive on the CPU

cloudpickle carries functions of `__main__` by value. What cannot travel is named.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from labsupport.ranks.frames import is_cell


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but tensors leave the GPU and cells' sources travel along."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType):
            filename = obj.__code__.co_filename
            if is_cell(filename) and filename in linecache.cache:  # nowhere on disk
                self.sources[filename] = "".join(linecache.getlines(filename))
        if isinstance(obj, CodeType):
            # cloudpickle drops the file name, and with it the lines in a traceback.
            make, parts = self.dispatch_table[CodeType](obj)
            return _named_code, (obj.co_filename, make, parts)
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and isinstance(obj, torch.Tensor)
            and (obj.is_cuda or obj.grad_fn is not None)
        ):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dump_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """One call as bytes. Raises TypeError naming what cannot be sent, before anything runs."""
    if not callable(function):
        raise TypeError(
            f"{function!r} is not callable; give a function, as in ranks.run(lambda: rank)"
        )
    try:
        return _dump_with_sources((function, tuple(args), dict(kwargs)))
    except Exception as error:  # pickling runs the code of any class
        named = {f"argument {place}": value for place, value in enumerate(args, 1)}
        named |= {f"argument {name!r}": value for name, value in kwargs.items()}
        named |= _names_used_by(function)
        for name, value in named.items():
            reason = _why_not(value)
            if reason:
                kind = type(value).__name__
                raise TypeError(
                    f"{name} (a {kind}) cannot be sent to the ranks: {reason}; "
                    f"make it inside the function instead"
                ) from None
        raise TypeError(f"{function!r} cannot be sent to the ranks: {error}") from error


def dump_result(value: Any) -> bytes:
    """A result as bytes. Raises TypeError naming its type."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(
            f"the result (a {type(value).__name__}) cannot be sent back: {error}; "
            f"return numbers, tensors or containers of them"
        ) from error
    return buffer.getvalue()


def load(content: bytes) -> Any:
    return pickle.loads(content)


def _named_code(filename: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=filename)


def _dump_with_sources(call: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    # The sources are complete only once the function has been walked through, so they come last.
    pickler.dump((*call, pickler.sources))
    return buffer.getvalue()


def _names_used_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Globals and enclosing variables that the function reads: description -> value."""
    if not inspect.isfunction(function):
        return {"the function": function}
    found = inspect.getclosurevars(function)
    return {
        f"variable {name!r}": value for name, value in {**found.globals, **found.nonlocals}.items()
    }


def _why_not(value: Any) -> str:
    """Why this value cannot be pickled; empty if it can."""
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:
        return str(error)
    return ""
