"""Pictures with sliders. Without a kernel (a code host, an exported page) the picture still stands.

from labsupport.widgets import link_explorer, ring_stepper
ring_stepper(world_size=4)
"""

from labsupport.widgets.batch_split import batch_split
from labsupport.widgets.bucket_size import bucket_size
from labsupport.widgets.link_explorer import link_explorer
from labsupport.widgets.live_picture import LivePicture
from labsupport.widgets.memory_anatomy import memory_anatomy
from labsupport.widgets.number_line import number_line
from labsupport.widgets.recompute_trade import recompute_trade
from labsupport.widgets.ring_stepper import ring_stepper
from labsupport.widgets.sharding_ladder import sharding_ladder
from labsupport.widgets.tensor_parallel import MeasuredLink, tensor_parallel_link

__all__ = [
    "LivePicture",
    "MeasuredLink",
    "batch_split",
    "bucket_size",
    "link_explorer",
    "memory_anatomy",
    "number_line",
    "recompute_trade",
    "ring_stepper",
    "sharding_ladder",
    "tensor_parallel_link",
]
