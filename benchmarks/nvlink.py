"""The sum of one bucket over two cards: over NVLink as tritonddp does it, and NCCL's all-reduce.

    torchrun --standalone --nproc-per-node 2 benchmarks/nvlink.py [--rounds 20] [--out FILE]

Several sums are given to the device behind a sleep that outlasts the host's work, and the time is
that between two events; a round has each way once, and its time is that of the slower rank.
Packing and unpacking are the same for both and not timed. Of a run of several buckets only the last
one has the second barrier ("NVLink, closing"), and that is hidden by what comes next. Where there
are no two cards, or no NVLink between them, it says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import deadline
import machine
import torch
import torch.distributed as dist
from gpu_parts import NOT_MEASURED
from ranks import Ranks, process_group

from tritonddp._device import SideStreams
from tritonddp._torch import symmetric_empty, symmetric_rendezvous
from tritonddp.comm.symmetric_memory import Block, SymmetricExchange, SymmetricMemory
from tritonddp.coordination.group import Group
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import Layout

SIZES = [1 << power for power in range(12, 24)]  # 4 KiB to 8 MiB
CALLS = 20  # between two events
SLEEP = 20_000_000  # cycles: 10 ms, and the host takes about 2
DISCARDED = 2  # rounds
TIMEOUT = 60_000  # milliseconds of a barrier


def measure(nbytes: int, ranks: Ranks, rounds: int, end: float) -> dict[str, Any]:
    """Seconds of one sum, by way, of as many rounds as there is time for until ``end``."""
    device = ranks.device
    kernels = select(device)
    layout = Layout.of([(nbytes // 4,)], [(1,)], kernels.alignment)
    flat = kernels.buffer(layout, torch.float32, device)
    memory = symmetric_empty(flat.nbytes, device).zero_()
    packed = kernels.buffer(layout, torch.float32, device, memory)
    packed.payload.fill_(ranks.rank + 1)
    packed.flags.fill_(1)
    handle = symmetric_rendezvous(memory, dist.group.WORLD)
    block = Block(memory, handle, TIMEOUT, SideStreams(priority=-1))
    # As of a bucket.
    bucket: Any = SimpleNamespace(flat=flat, params=flat.views, wire_dtype=torch.float32)
    exchange = SymmetricExchange(block, bucket, 0)
    reduced = torch.zeros_like(flat.data)

    def over_nvlink(closes: bool) -> None:
        exchange.launch(closes)
        exchange.wait()

    ways: dict[str, Callable[[], object]] = {
        "NCCL": lambda: dist.all_reduce(reduced),
        "NVLink": lambda: over_nvlink(closes=False),
        "NVLink, closing": lambda: over_nvlink(closes=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in deadline.rounds(rounds, end, discarded=DISCARDED, agreed=ranks.agreed):
        for name, way in ways.items():
            ranks.barrier()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP)
            first.record()
            for _ in range(CALLS):
                way()
            last.record()
            ranks.synchronize()
            took = torch.tensor(first.elapsed_time(last) / 1e3 / CALLS, device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= 0:
                seconds[name].append(took.item())
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    found = flat.payload[: nbytes // 4]
    if not bool((found == expected).all()):
        raise RuntimeError(f"the sum of {nbytes} bytes over NVLink is wrong: {found}")
    ranks.barrier()  # before memory goes that another rank may read
    return {
        "bytes": nbytes,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "raw_seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.sizes[:2] if options.rehearse else options.sizes
    if torch.cuda.device_count() < 2 and not options.rehearse:
        print(f"{NOT_MEASURED} needs two cards, and there are {torch.cuda.device_count()}")
        return 0
    with process_group("nccl") as ranks:
        group: Any = Group(dist.group.WORLD)  # type: ignore[arg-type]
        nobody: Any = None
        why = SymmetricMemory(group, nobody, nobody).agree([torch.empty(0, device=ranks.device)])
        if why:
            print(f"{NOT_MEASURED} {why}")
            return 0
        rows = []
        for number, nbytes in enumerate(sizes):
            end = deadline.share(1 / (len(sizes) - number))
            row = measure(nbytes, ranks, options.rounds, end)
            rows.append(row)
            if ranks.rank == 0:
                told = ", ".join(f"{way} {1e6 * s:.1f}" for way, s in row["seconds"].items())
                print(f"{nbytes:>8} bytes, us: {told}", flush=True)
                if options.out is not None:
                    facts = {"benchmark": "nvlink", "machine": machine.describe()}
                    content = {**facts, "world_size": ranks.world_size, "rows": rows}
                    machine.write_json(options.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
