"""Entry point of a rank that is started as a plain process. Its RankSpec is stdin's first line."""

import json
import os

import tqdm.auto  # noqa: F401 (before ipykernel: a bar of text, for widgets cannot be shown from a rank)

from labsupport.ranks.child import serve
from labsupport.ranks.spec import RankSpec

if __name__ == "__main__":
    with os.fdopen(0, "rb", buffering=0, closefd=False) as owner:
        spec = json.loads(owner.readline())
    serve(RankSpec(**spec))
