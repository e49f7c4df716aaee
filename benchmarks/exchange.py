"""One exchange of a bucket between ranks of one host: shared memory beside gloo's all-reduce.

    python benchmarks/exchange.py [--ranks 2 3 4] [--mpi PYTHON] [--out FILE]

Each round makes, in turns, for each size: gloo's all-reduce in place; the exchange of the package
through memory; and the copies that memory alone would take. Packing is the same for both and not
timed. Seconds are those of the slowest rank. ``--mpi`` names a Python with mpi4py (``pip install
mpich mpi4py``): MPICH's all-reduce, which uses shared memory too, with one copy in and one out, is
then timed by processes of its own, right behind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import processes
import torch
import torch.distributed as dist
from machine import describe, write_json

SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25 << 20, 64 << 20]

_MPI = """
import json, sys, time, statistics, numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
found = {}
for nbytes, rounds in json.loads(sys.argv[1]):
    source = np.random.rand(nbytes // 4).astype(np.float32)
    sent, came, target = source.copy(), source.copy(), source.copy()
    seconds = []
    for number in range(rounds + 3):
        comm.Barrier()
        start = MPI.Wtime()
        np.copyto(sent, source)
        comm.Allreduce(sent, came)
        np.copyto(target, came)
        seconds.append(comm.allreduce(MPI.Wtime() - start, MPI.MAX))
    found[nbytes] = statistics.median(seconds[3:])
if comm.rank == 0:
    print(json.dumps(found))
"""


def rounds_of(nbytes: int) -> int:
    """As many as take about a second."""
    return max(15, min(200, (512 << 20) // nbytes))


def measure(nbytes: int) -> dict[str, float]:
    """Median seconds by way, those of the slowest rank; on all ranks."""
    from torch import nn

    from tritonddp import DistributedDataParallel
    from tritonddp.coordination.peers import READ

    values = torch.rand(nbytes // 4)
    copied = values.clone()
    # A module of one parameter, whose bucket goes through memory from the second step on.
    module = nn.Module()
    module.register_parameter("values", nn.Parameter(values.clone()))
    module.forward = lambda: module.values.sum()  # type: ignore[method-assign]
    ddp = DistributedDataParallel(module, transport="peer_memory")
    for _ in range(2):
        ddp().backward()
    transport, (bucket,) = ddp._ddp_state.core.transport, ddp.reducer.buckets
    exchange, packed = bucket.exchange, bucket.packed.data[: len(values)]
    # What a reduction asks of its run, but for the trailer.
    run: Any = SimpleNamespace(
        works=[], is_logged=False, header=b"", read_trailer=lambda _: None, explain=None
    )

    def through_memory() -> None:
        if exchange.number > exchange.module.free:
            exchange.wait_for(READ)
        packed.copy_(values)
        run.works.clear()
        transport.launch(run, bucket)
        transport.wait(run, bucket)

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
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds_of(nbytes) + 3):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(took.item())
    torch.testing.assert_close(bucket.flat.data[: len(values)], copied)
    return {name: statistics.median(each[3:]) for name, each in seconds.items()}


def of_mpi(python: str, ranks: int, sizes: list[int]) -> dict[str, float]:
    """Median seconds of MPICH's all-reduce by size, with a copy in and one out."""
    plan = json.dumps([(nbytes, rounds_of(nbytes)) for nbytes in sizes])
    mpiexec = str(Path(python).with_name("mpiexec"))
    command = [mpiexec, "-n", str(ranks), python, "-c", _MPI, plan]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--mpi", help="a Python that has mpi4py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = {nbytes: measure(nbytes) for nbytes in options.sizes}
        if dist.get_rank() == 0:
            options.rank_of.write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result"
            arguments = ["--rank-of", str(path), "--sizes", *map(str, options.sizes)]
            command = [sys.executable, __file__, *arguments]
            with (Path(folder) / "log").open("w+b") as log:
                codes = processes.run(command, 600, log, ranks, {"OMP_NUM_THREADS": "1"})
                log.seek(0)
                if any(codes):
                    sys.exit(log.read().decode())
            found = json.loads(path.read_text())
        mpi = of_mpi(options.mpi, ranks, options.sizes) if options.mpi else {}
        for size, seconds in found.items():
            if mpi:
                seconds["mpich"] = mpi[size]
            rows.append({"ranks": ranks, "bytes": int(size), "seconds": seconds})
            ratio = seconds["gloo"] / seconds["memory"]
            told = "  ".join(f"{name} {1e3 * each:.3f}" for name, each in seconds.items())
            more = f", MPICH's time {seconds['memory'] / seconds['mpich']:.2f}" if mpi else ""
            print(f"{ranks} ranks {int(size):>9} bytes, ms: {told}: {ratio:.2f} times gloo{more}")
    if options.out:
        write_json(options.out, {"benchmark": "exchange", "machine": describe(), "rows": rows})


if __name__ == "__main__":
    main()
