"""What has to hold before a model is split, and whose weights are split?

check_whole(model, mesh)                # ValueError with the numbers, or with what comes first
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labsupport.config import ParallelConfig, check_fits
from labsupport.model import Llama


def check_whole(model: Llama, mesh: DeviceMesh) -> None:
    """Raise ValueError for what cannot be split over the ranks of `mesh`."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has axes {mesh.mesh_dim_names}; give one, as in mesh['tp']")
    if not isinstance(model, Llama) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} is wrapped or split already; tensor parallelism comes "
            f"first: tensor_parallel(Llama(config), mesh['tp']), then fully_sharded or others"
        )
    split = ParallelConfig(tensor_parallel_size=mesh.size())
    check_fits(model.config, split, seq_len=mesh.size())  # the real length shows in the forward
    linears = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    if linears - {nn.Linear}:
        names = ", ".join(kind.__name__ for kind in linears - {nn.Linear})
        raise ValueError(
            f"the model has {names}, with a scale for a whole matrix and its inputs, of which a "
            f"rank would see a part; use mixed_precision='bf16' under tensor parallelism"
        )
