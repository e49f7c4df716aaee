"""Steps of a net with BatchNorm over a line with latency: who waits for the buffers of rank 0?

    python benchmarks/buffers.py [--delay MS] [--rounds N] [--out FILE]

Two hosts (namespaces.py) with one rank each over gloo, and between them a relay in user space that
hands each packet on after ``--delay`` milliseconds. Stock DDP broadcasts buffers in each forward,
which waits; so does ours until it knows what changes, after which the statistics travel while the
optimizer runs. The rest of a step, all-reduces too, is the same; *off* has no buffers to send.
Steps are timed in turns, and collectives are counted.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from namespaces import network

from tritonddp import DistributedDataParallel
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, paired_ratio

DEVICE = "delayed0"
PORT = 29517
STEPS = 25  # of a round
LIMIT = 300.0  # seconds, of the ranks
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x1, 0x1000


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def tunnel(namespace: str, rank: int) -> int:
    """A network interface of a host whose packets this process reads and writes."""
    with open(f"/run/netns/{namespace}") as there, open("/proc/self/ns/net") as here:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.setns(there.fileno(), _CLONE_NEWNET)
        try:
            packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(packets, _TUNSETIFF, request)
            for command in (
                ["addr", "add", f"{address(rank)}/24", "dev", DEVICE],
                ["link", "set", DEVICE, "mtu", "60000", "up"],
            ):
                subprocess.run(["ip", *command], check=True)
        finally:
            libc.setns(here.fileno(), _CLONE_NEWNET)
    return packets


def relay(ends: Sequence[int], seconds: float, until: float) -> None:
    """Hand packets on to the other end after ``seconds``."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while time.monotonic() < until:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
        for end in select.select(ends, [], [], rest)[0]:
            number += 1
            packet = os.read(end, 65535)
            other = ends[1 - ends.index(end)]
            heapq.heappush(waiting, (time.monotonic() + seconds, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, other, packet = heapq.heappop(waiting)
            os.write(other, packet)


class Training:
    """Steps of a wrapped net with BatchNorm."""

    def __init__(self, wrap: Any, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [
            layer for _ in range(10) for layer in (nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU())
        ]
        self.model = wrap(nn.Sequential(*layers), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(64, 96)

    def seconds(self, steps: int = STEPS) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - begin) / steps


def rank_main(rank: int, rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address(0)}:{PORT}", rank=rank, world_size=2
    )
    stock = nn.parallel.DistributedDataParallel
    ways = {
        "stock": Training(stock, forward_sync_buffers=True),
        "ours": Training(DistributedDataParallel),
        "stock, off": Training(stock, forward_sync_buffers=False),
        "ours, off": Training(DistributedDataParallel, buffer_sync="off"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for each in ways.values():
        each.seconds()  # the buckets are made anew, and what changes is learnt
    for number in range(rounds):
        order = list(ways) if number % 2 else list(reversed(ways))
        for name in order:
            times[name].append(ways[name].seconds())
    if rank == 0:
        ours = paired_ratio(times["ours"], times["stock"])
        without = paired_ratio(times["ours, off"], times["stock, off"])
        result = {"seconds": times, "ours / stock": vars(ours), "off": vars(without)}
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=1.0, help="of a packet, ms (default 1)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.rounds, arguments.out)
        return
    facts = machine.describe()
    print(machine.summary(facts))
    with tempfile.TemporaryDirectory() as folder, network(2, rate=None) as hosts:
        found = Path(folder) / "result.json"
        ends = [tunnel(host.namespace, rank) for rank, host in enumerate(hosts)]
        command = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--out", str(found)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        ranks = [
            host.start([*command, "--rank", str(rank)], env=environment)
            for rank, host in enumerate(hosts)
        ]
        end = time.monotonic() + LIMIT
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            relay(ends, arguments.delay / 1e3, min(end, time.monotonic() + 0.5))
        if any(rank.poll() for rank in ranks):
            sys.exit(f"the ranks ended with {[rank.poll() for rank in ranks]}")
        result = json.loads(found.read_text())
    print(f"\n2 hosts, {arguments.delay:g} ms for each packet; step, ms (quartiles)")
    for name, seconds in result["seconds"].items():
        spread = Spread.of([each * 1e3 for each in seconds])
        print(f"  {name:12} {spread.median:7.2f} ({spread.q1:.2f} to {spread.q3:.2f})")
    print(f"  ours / stock: {Ratio(**result['ours / stock'])}; off: {Ratio(**result['off'])}")
    if arguments.out:
        machine.write_json(arguments.out, {"machine": facts, "delay_ms": arguments.delay, **result})


if __name__ == "__main__":
    main()
