"""One exchange of a bucket between ranks of one host: shared memory beside gloo's all-reduce.

    python benchmarks/network/exchange.py [--ranks 2 3 4] [--out FILE]

Each round makes, in turns, for each size: gloo's all-reduce in place; the exchange of the package
through memory; and the copies that memory alone would take. Packing is the same for both and not
timed. Seconds are those of the slowest rank. (MPICH's all-reduce, in the committed results, was
timed by an earlier commit.)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch.distributed as dist

from benchmarks.base import command, processes
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.report import tables
from benchmarks.report.table import text

SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20, 64 << 20]


def rounds_of(nbytes: int) -> int:
    """As many as take about a second."""
    return max(15, min(200, (512 << 20) // nbytes))


def measure(nbytes: int, ranks: Ranks) -> dict[str, float]:
    """Median seconds by way, those of the slowest rank; on all ranks."""
    from torch import nn

    from tritonddp import DistributedDataParallel

    values = torch.rand(nbytes // 4)
    copied = values.clone()
    # A module of one parameter, whose bucket goes through memory from the second step on.
    module = nn.Module()
    module.register_parameter("values", nn.Parameter(values.clone()))
    module.forward = lambda: module.values.sum()  # type: ignore[method-assign]
    ddp = DistributedDataParallel(module, transport="peer_memory")
    for _ in range(2):
        ddp().backward()
    (bucket,) = ddp.reducer.buckets
    exchange, packed = bucket.exchange, bucket.packed.data[: len(values)]
    buffers = bucket.large_sums  # of a large one the sum is made elsewhere
    reduced = bucket.flat.data[: len(values)] if buffers is None else torch.empty_like(values)

    def through_memory() -> None:
        exchange.before_pack()
        packed.copy_(values)
        exchange.wait(bucket, exchange.launch(bucket))
        if buffers is not None:
            buffers.sum_into([reduced], None)
            exchange.after_unpack()

    def through_gloo() -> None:
        copied.copy_(values)
        dist.all_reduce(copied)

    other = torch.empty_like(values)
    ways: dict[str, Callable[[], Any]] = {
        "gloo": through_gloo,
        "memory": through_memory,
        # As one shot: it reads what each rank has packed, and writes the sum.
        "copies": lambda: [other.copy_(values) for _ in range(2)],
    }
    timed = {name: partial(ranks.timed, way) for name, way in ways.items()}
    seconds = ranks.slowest(interleaved(timed, range(-3, rounds_of(nbytes))))
    torch.testing.assert_close(reduced, copied)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    options = parser.parse_args()
    if "RANK" in os.environ:
        with process_group("gloo") as ranks:
            found = {nbytes: measure(nbytes, ranks) for nbytes in options.sizes}
            if ranks.rank == 0:
                options.out.write_text(json.dumps(found))
        return
    output, rows = Output("exchange", options.out), []
    for ranks in options.ranks:
        found = processes.run_ranks(ranks, "--sizes", *options.sizes)
        for size, seconds in found.items():
            rows.append({"ranks": ranks, "bytes": int(size), "seconds": seconds})
        output.write({"rows": rows})
    output.say(*text(tables.exchange(Result(output.content))))


if __name__ == "__main__":
    main()
