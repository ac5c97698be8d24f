"""How long until ranks have done their first collective, and what does a cell add?

    python tests/benchmarks/ranks_start.py            # a table; nothing is asserted

Each way of starting runs in a fresh Python process, one after the other, on the same machine in the
same run: ranks forked from a template, the same with the template started beforehand, plain
processes, and ipyparallel with torch on its engines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

CELLS = 30
TIMED = f"""
import json, statistics, time
started = time.perf_counter()
def cells(run):
    times = []
    for _ in range({CELLS}):
        begin = time.perf_counter(); run(); times.append(time.perf_counter() - begin)
    return statistics.median(times)
"""
REPORT = """
print(json.dumps({"first_s": first, "cell_s": cell, "stop_s": time.perf_counter() - stop}))
"""
FORKED = """
from labsupport import Ranks
ranks = Ranks({n})
ranks.execute("dist.all_reduce(torch.ones(1))")
first = time.perf_counter() - started
cell = cells(lambda: ranks.execute("1"))
stop = time.perf_counter(); ranks.close()
"""
PRESTARTED = """
from labsupport.ranks import launch
launch.prestart(); time.sleep(6)
started = time.perf_counter()
"""
SPAWNED = """
from labsupport.ranks import launch
launch.choose_launcher = launch.SpawnLauncher
"""
IPYPARALLEL = """
import ipyparallel
cluster = ipyparallel.Cluster(n={n}, log_level=50); client = cluster.start_and_connect_sync()
view = client[:]; view.block = True
def join(rank, world_size, path):
    import torch, torch.distributed as dist
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))
import tempfile
path = tempfile.mktemp()
client[:].map_sync(join, range({n}), [{n}] * {n}, [path] * {n})
first = time.perf_counter() - started
cell = cells(lambda: view.execute("1"))
stop = time.perf_counter(); cluster.stop_cluster_sync()
"""


@dataclass(frozen=True)
class Row:
    way: str
    world_size: int
    first_s: float
    cell_s: float
    stop_s: float


def measure(way: str, source: str, world_size: int) -> Row:
    done = subprocess.run(
        [sys.executable, "-c", TIMED + source.replace("{n}", str(world_size)) + REPORT],
        capture_output=True,
        text=True,
        timeout=180,
    )
    if done.returncode:
        sys.exit(f"{way}: {done.stderr}")
    return Row(way, world_size, **json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    print(f"{'':34} ranks  first collective   one cell      stop")
    for way, source in [
        ("forked from a template", FORKED),
        ("  template started beforehand", PRESTARTED + FORKED),
        ("plain processes", SPAWNED + FORKED),
        ("ipyparallel", IPYPARALLEL),
    ]:
        for world_size in (2, 8):
            row = measure(way, source, world_size)
            print(
                f"{row.way:34} {row.world_size:5} {row.first_s:14.2f} s "
                f"{1000 * row.cell_s:9.1f} ms {row.stop_s:8.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
