"""Steps of nets with buffers: what does it cost that all ranks get those of rank 0?

    python benchmarks/features/buffers.py [--over host | line | delay] [--base REVISION]
        [--out FILE]

Two nets: *batch norm*, whose forwards change their statistics, and *constants*, with 12 masks and a
table of 4 MB that nothing changes. Stock broadcasts all buffers in each forward, and so does this
package. *off* has none to send. With ``--base`` an earlier revision takes part (see revision.py).
All are timed in turns, in the same processes.

Two ranks over gloo: on this ``host``, where ours share memory; on two hosts (namespaces.py) with a
``line`` of ``--rate`` bit/s; or with a relay in user space between the hosts that hands each packet
on after ``--delay`` milliseconds.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command, machine, processes
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import process_group
from benchmarks.network.namespaces import network, rank_environment
from benchmarks.report.table import Table, ms, quartiles, text
from benchmarks.step import revision
from tritonddp import DistributedDataParallel

DEVICE = "delayed0"
SECONDS = 0.3  # of a round, about
LIMIT = 600.0  # seconds, of the ranks
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


def batch_norm() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(10) for layer in (nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU()))
    )


class Constants(nn.Module):
    """Masks and a table that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(12))
        for number in range(12):
            self.register_buffer(f"mask{number}", torch.rand(64, 96) > 0.1)
        self.register_buffer("table", torch.randn(1 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu() * getattr(self, f"mask{number}")
        return x + self.table[:96]


NETS: dict[str, Callable[[], nn.Module]] = {"batch norm": batch_norm, "constants": Constants}


class Training:
    """Steps of a wrapped net."""

    def __init__(self, net: Callable[[], nn.Module], wrap: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = wrap(net(), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(64, 96)

    def seconds(self, steps: int) -> float:
        """Of a step: the median of this rank's."""
        dist.barrier()
        found = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(time.perf_counter() - begin)
        return sorted(found)[steps // 2]


def of_ranks(options: argparse.Namespace) -> None:
    """What each of the two ranks does."""
    stock = nn.parallel.DistributedDataParallel
    wrappers: dict[str, Any] = {"stock": stock, "ours": DistributedDataParallel}
    result: dict[str, Any] = {}
    with process_group("gloo") as ranks, tempfile.TemporaryDirectory() as folder:
        if options.base:
            base = revision.load(revision.resolve(options.base), Path(folder))
            wrappers["base"] = base.DistributedDataParallel
        for name, net in NETS.items():
            ways = {way: Training(net, wrap) for way, wrap in wrappers.items()}
            ways |= {
                f"{way}, off": Training(net, wrap, forward_sync_buffers=False)
                for way, wrap in wrappers.items()
                if way != "base"
            }
            result[name] = measure(ways, options.rounds)
        if ranks.rank == 0:
            machine.write_json(options.out, result)


def measure(ways: dict[str, Training], rounds: int) -> dict[str, Any]:
    """Time them in turns: seconds of a step, and ratios with their uncertainty."""
    steps = torch.zeros(1)
    for each in ways.values():  # buckets are made anew, ranks connect; the base learns
        each.seconds(40)
        steps += max(5, SECONDS / each.seconds(11)) / len(ways)
    dist.all_reduce(steps)
    few = int(steps) // 2
    times = interleaved(
        {name: partial(each.seconds, few) for name, each in ways.items()}, range(rounds)
    )
    ratios = {"ours / stock": ("ours", "stock"), "off": ("ours, off", "stock, off")}
    if "base" in ways:
        ratios |= {"base / stock": ("base", "stock"), "ours / base": ("ours", "base")}
    found = {name: vars(paired_ratio(times[a], times[b])) for name, (a, b) in ratios.items()}
    return {"seconds": times, "ratios": found}


def on_two_hosts(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What the ranks have found, behind lines of a rate or with a delay."""
    is_delayed = options.over == "delay"
    with (
        tempfile.TemporaryDirectory() as folder,
        network(2, rate=None if is_delayed else options.rate) as hosts,
    ):
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, *arguments, "--out", str(out)]
        ends = [tunnel(host.namespace, rank) for rank, host in enumerate(hosts) if is_delayed]
        ranks = []
        for rank, host in enumerate(hosts):
            environment = os.environ | rank_environment(hosts, rank)
            if is_delayed:
                environment |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": DEVICE}
            ranks.append(host.start(command, env=environment))
        end = time.monotonic() + LIMIT
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if ends:
                relay(ends, options.delay / 1e3, min(end, time.monotonic() + 0.5))
            else:
                time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
        if set(codes) != {0}:
            raise SystemExit(f"the ranks ended with {codes}")
        return json.loads(out.read_text())


def main() -> None:
    parser = command.parser(__doc__, rounds=20)
    parser.add_argument("--over", choices=["host", "line", "delay"], default="host")
    parser.add_argument("--rate", type=float, default=1e9, help="of the line, bit/s (default 1e9)")
    parser.add_argument("--delay", type=float, default=1.0, help="of a packet, ms (default 1)")
    parser.add_argument("--base", help="an earlier revision that takes part, HEAD~1 for example")
    options = parser.parse_args()
    if "RANK" in os.environ:
        of_ranks(options)
        return
    where = {
        "host": "one host",
        "line": f"2 hosts, {options.rate:g} bit/s",
        "delay": f"2 hosts, {options.delay:g} ms for each packet",
    }[options.over]
    output = Output("buffers", options.out, over=where, base=options.base)
    arguments = ["--rounds", str(options.rounds)]
    arguments += ["--base", options.base] if options.base else []
    if options.over == "host":
        nets = processes.run_ranks(2, *arguments, limit=LIMIT)
    else:
        nets = on_two_hosts(options, arguments)
    output.write({"nets": nets})
    for net, each in nets.items():
        spreads = {name: Spread.of(seconds) for name, seconds in each["seconds"].items()}
        rows = [(name, ms(spread.median), quartiles(spread)) for name, spread in spreads.items()]
        output.say(*text([Table((f"{net}, 2 ranks, {where}", "step, ms", "quartiles"), rows)]))
        output.say("; ".join(f"{name}: {Ratio(**one)}" for name, one in each["ratios"].items()))
    output.end()


if __name__ == "__main__":
    main()
