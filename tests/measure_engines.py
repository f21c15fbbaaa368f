"""What a cell costs on each engine: python tests/measure_engines.py [CELLS] [WORKERS], as root on a quiet machine.

Cells that do nothing, one engine after the other: this machine, a Ray of its own, a Slurm of its own with its default
settings, then one whose scheduler does not wait for more jobs to come. Per cell: the time from the start of the first
one to the end of the last, divided by the number of cells.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from tools import test_engines as engines

DEFAULTS = r"(?m)^(SchedulerParameters|MaxArraySize)=.*\n|,cred_expire=5"  # what the tests set otherwise


def measure(name, place, cells, workers, *flags):
    (place.folder / "nothing.py").write_text("")
    command = {"command": "python -I -S nothing.py", "seeds": cells}
    start = time.monotonic()
    place.run("--env-ids", "none", "--engine", name, "--workers", workers, *flags, **command, timeout=1200)
    wall = time.monotonic() - start
    records = [json.loads(path.read_text()) for path in place.folder.glob("runs/.benchmark/*/done.json")]
    assert len(records) == cells
    between = max(record["ended"] for record in records) - min(record["since"] for record in records)
    print(f"{place.folder.name:16} {1000 * between / cells:7.0f} ms per cell, {wall:6.1f} s in all", flush=True)


def main(cells=200, workers=2):
    print(f"{cells} cells, {workers} at a time")
    with tempfile.TemporaryDirectory() as folder, engines.network() as (name, before):
        folder = Path(folder)
        for kind in ("local", "ray", "slurm", "eager slurm"):
            (folder / kind).mkdir()
        measure("local", engines.Place(folder / "local"), cells, workers)
        measure("ray", engines.Place(folder / "ray", before), cells, workers)
        engines.SLURM = re.sub(DEFAULTS, "", engines.SLURM).replace("CPUs=4", f"CPUs={workers}")
        cluster = engines.Slurm(folder, before)
        cluster.start()
        for kind in ("slurm", "eager slurm"):
            place = engines.Place(folder / kind, before, SLURM_CONF=cluster.env["SLURM_CONF"])
            measure("slurm", place, cells, workers, "--slurm-gpus-per-task", 0)
            cluster.configure("SchedulerParameters=batch_sched_delay=0,sched_interval=1")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
