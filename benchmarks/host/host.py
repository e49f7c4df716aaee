"""What DDP costs the host: per parameter, per bucket and per step, stock beside ours.

    python benchmarks/host/host.py [--rounds 40] [--out FILE]

A world of one, so that nothing waits for a link. Ours nevertheless sends what it would send to
other ranks, as stock does. Only *idle* ours sends nothing, which is what a user gets with one rank.
One thread on the CPU, or a GPU with NCCL, for which only the host's time is measured. All
configurations run in shuffled rounds with a bare model, and each figure is the median over rounds
of a difference within a round. A second bare model, *unwrapped*, shows the resolution. No internals
are called: ordinary user hooks on a few parameters, which run before the hooks of DDP, record when
gradients are ready.

parameter   1,000 parameters of 64 elements in one bucket: the backward minus the bare one.
bucket      the same parameters in 20 buckets of 50: from the last gradient of a bucket to the next
            gradient, minus the same within a bucket (*launch*: flatten 50 gradients, issue the
            collective).
step        one parameter, one bucket: the backward minus the bare one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import torch
import torch.distributed as dist

from benchmarks.base import command, deadline
from benchmarks.base.paired import Spread
from benchmarks.base.results import Result
from benchmarks.host.subjects import DEVICE, PARAMETERS, PER_BUCKET, Subject, Times, time_rounds
from benchmarks.models.configurations import UNWRAPPED, Configuration, families, idle_of
from benchmarks.report import tables
from benchmarks.report.table import text

ROUNDS = 40
BUCKETS = PARAMETERS // PER_BUCKET

BARE = Configuration("bare", None)
CONFIGURATIONS = [
    UNWRAPPED,
    *(each for family in families() for each in (*family.stock, family.ours, idle_of(family.ours))),
]
# In each bucket but the first and last: two adjacent parameters each in its middle and at its end.
NEIGHBOURS = [
    first + place
    for first in range(PER_BUCKET, PARAMETERS - PER_BUCKET, PER_BUCKET)
    for place in (PER_BUCKET // 2 - 1, PER_BUCKET // 2, PER_BUCKET - 1, PER_BUCKET)
]


def main() -> int:
    options = command.parser(__doc__, ROUNDS).parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)  # as torchrun sets it
    output = command.Output("host", options.out)
    rows: list[dict[str, Any]] = []
    # A world of one, with a store on the loopback interface: no host name needs to resolve.
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        # Unused time of the first measurement goes to the second.
        for measure, end in deadline.shares([one_parameter, many_parameters]):
            rows += measure(options.rounds, end)
            output.write({"benchmarks": rows})
    finally:
        dist.destroy_process_group()
    output.say(*text(tables.host(Result(output.content))))
    return 0


def many_parameters(rounds: int, end: float) -> Iterator[dict[str, Any]]:
    """Measure 1,000 parameters, in one bucket and in 20."""
    subjects = {}
    for each in (BARE, *CONFIGURATIONS):
        subjects[each.name, 1] = Subject(each, PARAMETERS, PARAMETERS)
        subjects[each.name, BUCKETS] = Subject(each, PARAMETERS, PER_BUCKET, NEIGHBOURS)
    times = time_rounds(subjects, rounds, end)
    bare = _backwards(times[BARE.name, 1])
    for each in CONFIGURATIONS:
        own = _backwards(times[each.name, 1])
        us = {"all": _beyond(own, bare, per=PARAMETERS)}
        yield _row("parameter", each.name, own, {"bare": bare}, us)
    for each in CONFIGURATIONS:
        many = times[each.name, BUCKETS]
        within = [_median_gap(one, first=0) for one in many]
        between = [_median_gap(one, first=2) for one in many]
        seconds = {"within": within, "between": between}
        us = {"launch": _beyond(between, within)}
        yield _row("bucket", each.name, _backwards(many), seconds, us)


def one_parameter(rounds: int, end: float) -> Iterator[dict[str, Any]]:
    """Measure one parameter in one bucket."""
    subjects = {(each.name, 1): Subject(each, 1, 1) for each in (BARE, *CONFIGURATIONS)}
    times = time_rounds(subjects, rounds, end)
    bare = _backwards(times[BARE.name, 1])
    for each in CONFIGURATIONS:
        own = _backwards(times[each.name, 1])
        yield _row("step", each.name, own, {"bare": bare}, {"backward": _beyond(own, bare)})


def _backwards(rounds: Sequence[Times]) -> list[float]:
    return [times.backward for times in rounds]


def _median_gap(times: Times, first: int) -> float:
    """Return the median gap from mark ``first`` of each bucket to the next mark, in seconds."""
    gaps = [second - first for first, second in pairwise(times.marks)]
    return Spread.of(gaps[first::4]).median


def _beyond(seconds: Sequence[float], base: Sequence[float], per: int = 1) -> Spread:
    """Return the spread of differences within rounds, in microseconds per item of ``per``."""
    pairs = zip(seconds, base, strict=True)
    return Spread.of([1e6 * (long - short) / per for long, short in pairs])


def _row(
    kind: str,
    name: str,
    backward: Sequence[float],
    seconds: dict[str, list[float]],
    us: dict[str, Spread],
) -> dict[str, Any]:
    """Return a row: ``backward`` in seconds and derived values, with the clock's 6 digits."""
    info = {
        "kind": kind,
        "configuration": name,
        "device": DEVICE.type,
        "us": {column: asdict(spread) for column, spread in us.items()},
        "seconds": seconds,
    }
    stats = {"rounds": len(backward), "median": Spread.of(backward).median, "data": backward}
    row = {"group": kind, "name": f"{kind}-{name}", "extra_info": info, "stats": stats}
    return json.loads(json.dumps(row), parse_float=lambda each: float(f"{float(each):.6g}"))


if __name__ == "__main__":
    sys.exit(main())
