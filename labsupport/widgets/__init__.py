"""Pictures with sliders. Without a kernel (a code host, an exported page) the picture still stands.

from labsupport.widgets import link_explorer, ring_stepper
ring_stepper(world_size=4)
"""

from labsupport.widgets.batch_split import batch_split
from labsupport.widgets.link_explorer import link_explorer
from labsupport.widgets.live_picture import LivePicture
from labsupport.widgets.ring_stepper import ring_stepper

__all__ = ["LivePicture", "batch_split", "link_explorer", "ring_stepper"]
