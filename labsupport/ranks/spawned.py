"""Entry point of a rank that is started as a plain process: `-m labsupport.ranks.spawned SPEC`."""

import json
import sys

import tqdm.auto  # noqa: F401 (before ipykernel: a bar of text, for widgets cannot be shown from a rank)

from labsupport.ranks.child import serve
from labsupport.ranks.spec import RankSpec

if __name__ == "__main__":
    serve(RankSpec(**json.loads(sys.argv[1])))
