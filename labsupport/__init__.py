"""A lab for distributed training and inference of language models.

    %load_ext labsupport
    from labsupport import Ranks
    ranks = Ranks(2)
    ranks.run(lambda: torch.distributed.get_rank())     # [0, 1]

Importing this package loads neither torch nor Jupyter: names are looked up when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import labsupport.results as results
    from labsupport.ranks import RankDied as RankDied
    from labsupport.ranks import RankError as RankError
    from labsupport.ranks import Ranks as Ranks
    from labsupport.ranks import RankTimeout as RankTimeout

__version__ = "0.1.0"
__all__ = ["RankDied", "RankError", "RankTimeout", "Ranks", "results"]


def __getattr__(name: str) -> Any:
    if name in {"RankDied", "RankError", "RankTimeout", "Ranks"}:
        return getattr(import_module("labsupport.ranks"), name)
    if name == "results":
        return import_module("labsupport.results")
    raise AttributeError(f"module 'labsupport' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register `%%ranks` and start the process that ranks are forked from."""
    import_module("labsupport.ranks.magic").load(shell)
