"""Bandwidth of all-reduces between the cards of this machine, by themselves.

    torchrun --standalone --nproc-per-node gpu benchmarks/gpu/bus.py [--mib 25 ...] [--out FILE]

Of all ranks the first 2, 4 and 8 in turn, as far as there are: what NCCL can do here, beside which
the exposed time of a step is read. A round is a few all-reduces behind each other, from a barrier
until the device is idle; *bus* is what nccl-tests calls so.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch.distributed as dist

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.report import tables
from benchmarks.report.table import text

MIB = (1, 4, 25, 100, 400)
WORLDS = (2, 4, 8)
CALLS = 4  # of a round


def main() -> None:
    parser = command.parser(__doc__, rounds=20)
    parser.add_argument("--mib", nargs="+", type=command.positive, default=MIB, help="sizes")
    options = parser.parse_args()
    with process_group("nccl") as ranks:
        output = Output("bus", options.out, ranks.rank == 0, world_size=ranks.world_size)
        worlds = [size for size in WORLDS if size <= ranks.world_size]
        groups = {size: dist.new_group(range(size)) for size in worlds}
        rows: list[dict[str, Any]] = []
        for (size, mib), end in deadline.shares([(s, m) for s in worlds for m in options.mib]):
            rows.append(measure(ranks, groups[size], size, mib << 20, options.rounds, end))
            output.write({"rows": rows})
        output.say(*text(tables.bus(Result(output.content))))


def measure(
    ranks: Ranks, group: Any, size: int, nbytes: int, rounds: int, end: float
) -> dict[str, Any]:
    """Seconds of one all-reduce of so many bytes, of the slowest rank; collective of all ranks."""
    values = torch.zeros(nbytes // 4, device=ranks.device)

    def reduce() -> None:
        for _ in range(CALLS if ranks.rank < size else 0):
            dist.all_reduce(values, group=group)

    numbers = deadline.rounds(rounds, end, discarded=3, agreed=ranks.agreed)
    ways = {"seconds": partial(ranks.timed, reduce)}
    found = ranks.slowest(deadline.interleaved(ways, numbers))["seconds"]
    seconds = median(found) / CALLS
    bus = 2 * (size - 1) / size * nbytes / seconds / 1e9
    return {"ranks": size, "bytes": nbytes, "seconds": seconds, "bus": bus, "rounds": len(found)}


if __name__ == "__main__":
    main()
