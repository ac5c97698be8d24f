"""Where does a run leave its files, and can it?

--run-dir, else --checkpoint-dir, else runs/20260131-120000-tiny-fsdp2      manifest, metrics

check_writable(Path("out/ckpt"))        # ValueError, without creating anything
folder = create_run_dir(request)
"""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path

from labsupport.train.request import Request

RUNS = Path("runs")


def check_writable(*folders: Path) -> None:
    """Raise ValueError where a folder, or the nearest one above it that exists, refuses files."""
    for folder in folders:
        nearest = folder.expanduser().absolute()
        while not os.path.exists(nearest):  # as Path.exists, but no error where we may not look
            nearest = nearest.parent
        if not nearest.is_dir():
            raise _refusal(folder, f"{nearest} is a file")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _refusal(folder, f"{nearest} is not writable")


def check_apart(request: Request) -> None:
    """Raise ValueError where an export, which has its folder to itself, would find other files."""
    if request.export_hf is None:
        return
    export = request.export_hf.expanduser()
    for folder in (run_dir_of(request), request.checkpoint_dir):
        if folder is not None and folder.expanduser().resolve().is_relative_to(export.resolve()):
            raise ValueError(
                f"export folder {str(request.export_hf)!r} would hold {str(folder)!r} of the same "
                f"run, but an export has its folder to itself; name another, for example "
                f"{str(request.export_hf / 'hf')!r}"
            )


def folders_of(request: Request) -> list[Path]:
    """All folders that the run will write to."""
    named = [request.run_dir, request.checkpoint_dir, request.export_hf]
    return [run_dir_of(request), *(folder for folder in named if folder is not None)]


def run_dir_of(request: Request) -> Path:
    """The folder of manifest and metrics: as asked for, or under `runs` by time and strategy."""
    asked = request.run_dir or request.checkpoint_dir
    if asked is not None:
        return asked.expanduser()
    parallel = request.parallel
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    strategy = f"{parallel.data_parallel_sharding}{parallel.data_parallel_size}"
    strategy += f"-tp{tp}" * (tp > 1) + f"-cp{cp}" * (cp > 1)
    model = Path(request.model_name).name
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{strategy}-{os.getpid()}"


def create(*folders: Path) -> None:
    """Make the folders and write to each once; ValueError where that fails."""
    for folder in folders:
        try:
            folder.expanduser().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.expanduser()):
                pass
        except OSError as error:
            raise _refusal(folder, error.strerror or str(error)) from None


def _refusal(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"folder {str(folder)!r} cannot be written ({reason}); name one that can, "
        f"for example {str(Path(tempfile.gettempdir(), 'run'))!r}"
    )
