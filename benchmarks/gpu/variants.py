"""Whole steps of one rank by options that only a GPU can measure, and where their time goes.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu/variants.py [--models gpt2_small ...]
        [--out FILE]

Bucket sizes, large gradients in place, and the default, beside stock with copies and with views;
all send, also with one rank. In interleaved rounds each step is timed from an idle device until
forward and backward have returned (*host*: what the host needs to enqueue it) and until the device
is idle (*step*). Where both are alike the host is what the step waits for. Then, by the profiler,
in one step of some of them: the host's time in each operation, and the device's in each kernel.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Batch, Case, loss
from benchmarks.models.configurations import UNWRAPPED, Configuration, families
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.plan import SETTLED
from tritonddp import DistributedDataParallel

COPIES, VIEWS = families()
VARIANTS: dict[str, dict[str, Any]] = {
    "ours strict": {"find_unused_parameters": False},
    "ours 25 MiB": {"bucket_cap_mb": 25},
    "ours 50 MiB": {"bucket_cap_mb": 50},
    "ours 100 MiB": {"bucket_cap_mb": 100},
    "ours in place": {"reduce_in_place": True},
}
CONFIGURATIONS = (
    *(UNWRAPPED, COPIES.stock[0], VIEWS.stock[0], COPIES.ours, VIEWS.ours),
    *(Configuration(name, DistributedDataParallel, each) for name, each in VARIANTS.items()),
)
OPERATIONS = 40  # of a profile
PROFILED = ("unwrapped", "stock views", "ours", "ours views")


def main() -> None:
    options = command.parser(__doc__, rounds=20, models=(CASES, ["gpt2_small", "mlp"])).parse_args()
    found: dict[str, Any] = {}
    with process_group("nccl") as ranks:
        output = Output("variants", options.out, ranks.rank == 0, world_size=ranks.world_size)
        for name, end in deadline.shares(options.models):
            try:
                found[name] = measure(CASES[name], ranks, options.rounds, end)
            except torch.OutOfMemoryError as error:  # of a card that cannot hold it so often
                found[name] = {"error": str(error)}
            gc.collect()
            output.write({"models": found})
            output.say("", *text(tables.variants(output.only("models", name))))


def measure(case: Case, ranks: Ranks, rounds: int, end: float) -> dict[str, Any]:
    """All configurations on one model until ``end``; what JSON says."""
    copies = case.copies(ranks.device)
    models = {each.name: each.wrap(next(copies)) for each in CONFIGURATIONS}
    copies.close()
    batch = case.batch(ranks.device, ranks.rank)
    ways = {name: partial(_timed, model, batch, ranks) for name, model in models.items()}
    for _ in range(SETTLED["cuda"]):
        for name in ways:
            ways[name]()
    numbers = deadline.rounds(rounds, end, discarded=1, agreed=ranks.agreed)
    samples = deadline.interleaved(ways, numbers, case.name)
    return {
        name: {
            "host_seconds": median(host for host, _ in each),
            "step_seconds": median(step for _, step in each),
            "raw": each,
            "profile": _profile(models[name], batch, ranks) if name in PROFILED else None,
        }
        for name, each in samples.items()
    }


def _timed(model: nn.Module, batch: Batch, ranks: Ranks) -> tuple[float, float]:
    """Seconds until forward and backward have returned, and until the device is idle."""
    model.zero_grad(set_to_none=True)
    ranks.barrier()
    start = time.perf_counter()
    loss(model, batch).backward()
    host = time.perf_counter() - start
    ranks.synchronize()
    return host, time.perf_counter() - start


def _profile(model: nn.Module, batch: Batch, ranks: Ranks) -> dict[str, dict[str, float]]:
    """Operations of one step, those that take longest first; microseconds."""
    model.zero_grad(set_to_none=True)
    ranks.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loss(model, batch).backward()
        ranks.synchronize()
    totals: dict[str, dict[str, float]] = {}
    for event in profiler.events():
        if event.is_user_annotation:  # on the device's track too, and no work
            continue
        total = totals.setdefault(event.name, {"count": 0, "host": 0.0, "device": 0.0})
        total["count"] += 1
        if event.device_type == DeviceType.CUDA:
            total["device"] += event.self_device_time_total
        else:
            total["host"] += event.self_cpu_time_total
    longest = sorted(totals, key=lambda name: -totals[name]["host"] - totals[name]["device"])
    return {name: totals[name] for name in longest[:OPERATIONS]}


if __name__ == "__main__":
    main()
