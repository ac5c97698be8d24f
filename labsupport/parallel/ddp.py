"""Data parallelism as torch does it: every rank holds the model, gradients are averaged in buckets.

    memory of a rank = memory of one process        bytes sent per step = 2(n-1)/n · gradients

    model = data_parallel(Llama(config))       # all ranks now hold rank 0's weights
    loss.backward()                            # buckets travel while the backward goes on
    with model.no_sync(): …                    # backwards in here only add to the local gradients

`labsupport.parallel.hand_ddp` shows what happens inside.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: int | None = None,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """torch's DDP over `group`, for a model that is already on this rank's device.

    bucket_cap_mb: MiB of a bucket; None is torch's 25, and 1 for the first bucket.
    find_unused_parameters: needed where a parameter may get no gradient in a step; it costs a
    walk through the graph each time.

    Raises ValueError for a model in which nothing is trained: there is nothing to average.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter of the model requires a gradient, so no gradient is to be averaged; "
            "use the model as it is, or unfreeze a part with requires_grad_(True)"
        )
    device = trained[0].device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy of them
    )
