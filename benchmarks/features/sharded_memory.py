"""Peak memory of a rank with a sharded optimizer, compared with torch's class and a plain one.

    python benchmarks/features/sharded_memory.py [--rounds N] [--out FILE]

The model of sharded.py with AdamW, on two and on four ranks of this host over gloo. Each way is
measured ``--rounds`` times in new processes: the largest proportional set size (memory that several
processes share is divided among them) of a rank during ten steps, above its size before the model.
The mean over the ranks is shown, because a rank owns more or less than the others.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch.distributed as dist

from benchmarks.base import command, machine, processes
from benchmarks.base.command import Output
from benchmarks.base.ranks import process_group
from benchmarks.features.sharded import OPTIMIZERS, Training, ways_of
from benchmarks.report.table import Table, text

STEPS, RANKS, PAUSE = 10, (2, 4), 0.02  # seconds between two samples
VIEWS = " views"


def proportional_bytes() -> int:
    """Return the proportional set size of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


class Peak(threading.Thread):
    """Samples the memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self.start_bytes = self.bytes = proportional_bytes()

    def run(self) -> None:
        while not self._stopped.wait(PAUSE):
            self.bytes = max(self.bytes, proportional_bytes())

    def stop(self) -> int:
        """Return the peak above the start."""
        self._stopped.set()
        self.join()
        return self.bytes - self.start_bytes


def of_ranks(way: str, out: Path) -> None:
    """Write the peaks of all ranks."""
    with process_group("gloo") as ranks:
        peak = Peak()
        peak.start()
        kind = way.removesuffix(VIEWS)
        training: Training = ways_of(*OPTIMIZERS["AdamW"])[kind](views=way.endswith(VIEWS))
        for _ in range(STEPS):
            training.seconds()
        found = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        found[ranks.rank] = peak.stop()
        dist.all_reduce(found)
        if ranks.rank == 0:
            machine.write_json(out, found.tolist())


def main() -> None:
    parser = command.parser(__doc__, rounds=3)
    parser.add_argument("--way", help="internal: what the ranks measure")
    options = parser.parse_args()
    if options.way:
        of_ranks(options.way, options.out)
        return
    output = Output("sharded_memory", options.out)
    ways = [f"{way}{views}" for way in ("replicated", "sharded", "torch") for views in ("", VIEWS)]
    peaks: dict[str, Any] = {way: {str(ranks): [] for ranks in RANKS} for way in ways}
    for _ in range(options.rounds):  # in turns
        for way in ways:
            for ranks in RANKS:
                peaks[way][str(ranks)].append(processes.run_ranks(ranks, "--way", way))
        output.write({"peak_bytes": peaks})
    rows = [
        (way, *(f"{fmean(map(fmean, peaks[way][str(ranks)])) / 1e6:.0f}" for ranks in RANKS))
        for way in ways
    ]
    output.say(*text([Table(("peak, MB", *(f"{ranks} ranks" for ranks in RANKS)), rows)]))
    output.end()


if __name__ == "__main__":
    main()
