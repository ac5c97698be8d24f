"""How fast are DeepSpeed's stages beside torch's fully_shard, on this machine?

    python tests/benchmarks/deepspeed_fsdp.py                 # ratios; nothing is asserted
    python tests/benchmarks/deepspeed_fsdp.py --record        # and keep them in recorded/

Every round runs all recipes one after the other in the same ranks; a ratio is the median over the
rounds of (step of the recipe / step of fully_shard in that round), so that a slow minute hits both.
Needs `make deepspeed`. What --record keeps is the last round, for machines without DeepSpeed.
"""

from __future__ import annotations

import argparse
import statistics
from importlib import metadata

import torch

from labsupport import Ranks
from labsupport.config import ModelConfig
from labsupport.devices import allowed_cpus
from labsupport.parallel import deepspeed
from labsupport.results import Store, measured
from labsupport.results.recordings import recorded_folder
from labsupport.train.library_table import LibraryComparison, compare_libraries

REFERENCE = "fully_shard"


def record(found: LibraryComparison) -> None:
    path = recorded_folder() / "deepspeed.jsonl"
    path.unlink(missing_ok=True)
    version = next(iter(metadata.distributions(path=[str(deepspeed.packages())], name="deepspeed")))
    on = (
        f"{found.table.rows[0].quantity.source}, {allowed_cpus()} CPU cores, "
        f"DeepSpeed {version.version}, torch {torch.__version__}"
    )
    for row in found.table:
        number = row.quantity
        Store(path).add(measured(number.name, number.value, number.unit, on=on), **row.tags)
    print(f"kept in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each recipe a round")
    parser.add_argument("--record", action="store_true", help="keep the last round in recorded/")
    args = parser.parse_args()
    if not deepspeed.is_installed():
        raise SystemExit(deepspeed.MISSING)
    rounds = []
    with Ranks(args.ranks, device="cpu", threads_per_rank=1, collective_timeout_s=120) as ranks:
        for _ in range(args.rounds):
            model = ModelConfig.named(args.model)
            rounds.append(compare_libraries(ranks, model=model, timed_steps=args.steps))
    print(rounds[-1])
    for recipe in rounds[-1].recipes:
        ratios = [found.step_s(recipe) / found.step_s(REFERENCE) for found in rounds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{recipe:26} {statistics.median(ratios):5.2f} × {REFERENCE}  ({spread})")
    if args.record:
        record(rounds[-1])


if __name__ == "__main__":
    main()
