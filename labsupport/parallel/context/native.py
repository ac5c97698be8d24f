"""torch's own ring attention: where does it run, and how is it called?

    with native_context_parallel(mesh["cp"], [input_ids, labels, positions]):
        loss = token_loss(model(input_ids, positions=positions), labels).sum
        loss.backward()

Inside, the tensors hold this rank's zig-zag part, and scaled_dot_product_attention is torch's ring
over the mesh; afterwards both are as before. The model is an ordinary one. torch calls it
experimental, and has the ring for the fused attention of GPUs only: on CPUs there is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
"""Kernels that torch sends round the ring. The unfused one would see this rank's keys only."""


@contextmanager
def native_context_parallel(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Cut `tensors`, (batch, seq) or (seq,), over the 1-D mesh, and let attention go round it.

    Raises ValueError on CPUs, where torch has no rule for splitting the attention operator.
    """
    if mesh.device_type != "cuda":
        raise ValueError(
            f"torch's context_parallel cannot run on {mesh.device_type!r}: it has no rule for the "
            f"attention operator of CPUs (_scaled_dot_product_flash_attention_for_cpu), only for "
            f"the fused ones of GPUs; labsupport.parallel.context.context_parallel runs on both"
        )
    dims = [tensor.ndim - 1 for tensor in tensors]
    with (
        sdpa_kernel(FUSED),
        torch_context_parallel(mesh, buffers=list(tensors), buffer_seq_dims=dims),
    ):
        yield
