"""What DDP costs the host: per parameter, per bucket and per step, stock beside ours.

    python benchmarks/host/host.py [--rounds 40] [--out FILE]

A world of one, so that no line is waited for; all the same ours sends what it would send to others,
as stock does, but for *idle* ours: that is what a user has who trains alone. One thread on the CPU,
or a GPU over NCCL, of which only the host's time counts. All configurations run in shuffled rounds
with a bare model, and each figure is the median over rounds of a difference within a round. A
second bare model, *unwrapped*, shows the resolution.

parameter   1,000 parameters of 64 elements in one bucket: the backward beyond the bare one, and of
            it what lies between the gradients (*hook*), per parameter. Stock's default copies
            gradients there, the others when the bucket is full.
bucket      the same parameters in 20 buckets of 50: from the last gradient of a bucket to the next,
            beyond the same within a bucket (*launch*: flatten 50 gradients, issue the collective);
            and the whole backward beyond that with one bucket, per further bucket.
step        one parameter, one bucket: forward and backward beyond the bare ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch.distributed as dist

from benchmarks.base import suite
from benchmarks.base.paired import Spread
from benchmarks.base.suite import Row
from benchmarks.host.subjects import PARAMETERS, PER_BUCKET, Subject, Times, time_rounds
from benchmarks.models.configurations import UNWRAPPED, Configuration, families, idle_of
from benchmarks.report import tables
from benchmarks.report.table import text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 40

CONFIGURATIONS = [
    UNWRAPPED,
    *(
        each
        for family in families()
        for each in (*family.stock, family.ours, idle_of(family.ours), *family.beside)
    ),
]
BARE = Configuration("bare", None)
BUCKETS = PARAMETERS // PER_BUCKET

# In the one bucket: all gradients but those at both ends.
SPAN = (10, PARAMETERS - 10)
# In each of the buckets but the first and the last: two neighbours in its middle, two at its end.
NEIGHBOURS = [
    first + place
    for first in range(PER_BUCKET, PARAMETERS - PER_BUCKET, PER_BUCKET)
    for place in (PER_BUCKET // 2 - 1, PER_BUCKET // 2, PER_BUCKET - 1, PER_BUCKET)
]

Rounds = dict[tuple[str, int], list[Times]]  # by configuration and number of buckets


def main() -> int:
    # A world of one, with a store of our own on the loopback: no host name needs to resolve.
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    # (What the first leaves of its share of the time is the second's.)
    groups = {"one parameter": one_parameter, "many parameters": many_parameters}
    try:
        return suite.run(__doc__, "host", groups, ROUNDS, lambda of: text(tables.host(of)))
    finally:
        dist.destroy_process_group()


def many_parameters(rounds: int, end: float) -> Iterator[Row]:
    """1,000 parameters, in one bucket and in 20."""
    subjects = {}
    for each in (BARE, *CONFIGURATIONS):
        subjects[each.name, 1] = Subject(each, DEVICE, PARAMETERS, PARAMETERS, SPAN)
        subjects[each.name, BUCKETS] = Subject(each, DEVICE, PARAMETERS, PER_BUCKET, NEIGHBOURS)
    times = time_rounds(subjects, DEVICE, rounds, end)
    for row in (_parameter, _bucket):
        yield from (row(each.name, times) for each in CONFIGURATIONS)


def one_parameter(rounds: int, end: float) -> Iterator[Row]:
    """One parameter in one bucket."""
    subjects = {(each.name, 1): Subject(each, DEVICE, 1, 1) for each in (BARE, *CONFIGURATIONS)}
    times = time_rounds(subjects, DEVICE, rounds, end)
    yield from (_step(each.name, times) for each in CONFIGURATIONS)


def _parameter(name: str, times: Rounds) -> Row:
    own, bare = _backwards(times[name, 1]), _backwards(times[BARE.name, 1])
    own_span = [each.nanoseconds(0, 1) for each in times[name, 1]]
    bare_span = [each.nanoseconds(0, 1) for each in times[BARE.name, 1]]
    return _row(
        "parameter",
        name,
        own,
        seconds={"bare": bare, "span": own_span, "bare span": bare_span},
        us={
            "all": _beyond(own, bare, per=PARAMETERS),
            "hook": _beyond(own_span, bare_span, per=SPAN[1] - SPAN[0]),
        },
    )


def _bucket(name: str, times: Rounds) -> Row:
    many, one = _backwards(times[name, BUCKETS]), _backwards(times[name, 1])
    within = [_median_gap(each, first=0) for each in times[name, BUCKETS]]
    between = [_median_gap(each, first=2) for each in times[name, BUCKETS]]
    return _row(
        "bucket",
        name,
        many,
        seconds={"one bucket": one, "within": within, "between": between},
        us={"all": _beyond(many, one, per=BUCKETS - 1), "launch": _beyond(between, within)},
    )


def _step(name: str, times: Rounds) -> Row:
    own, bare = _backwards(times[name, 1]), _backwards(times[BARE.name, 1])
    own_forward = [each.forward for each in times[name, 1]]
    bare_forward = [each.forward for each in times[BARE.name, 1]]
    return _row(
        "step",
        name,
        own,
        seconds={"bare": bare, "forward": own_forward, "bare forward": bare_forward},
        us={"forward": _beyond(own_forward, bare_forward), "backward": _beyond(own, bare)},
    )


def _backwards(rounds: Sequence[Times]) -> list[float]:
    return [times.backward for times in rounds]


def _median_gap(times: Times, first: int) -> float:
    """Of the gaps from mark ``first`` of each bucket to the next mark, in seconds."""
    gaps = [times.nanoseconds(mark, mark + 1) for mark in range(first, len(times.marks), 4)]
    return Spread.of(gaps).median


def _beyond(seconds: Sequence[float], base: Sequence[float], per: int = 1) -> Spread:
    """Differences within a round, in microseconds per one of ``per``."""
    pairs = zip(seconds, base, strict=True)
    return Spread.of([1e6 * (long - short) / per for long, short in pairs])


def _row(
    kind: str,
    name: str,
    backward: Sequence[float],
    seconds: dict[str, list[float]],
    us: dict[str, Spread],
) -> Row:
    """``backward`` in seconds, and what is made of it."""
    info = {
        "kind": kind,
        "configuration": name,
        "device": DEVICE.type,
        "us": {column: asdict(spread) for column, spread in us.items()},
        "seconds": seconds,
    }
    return Row(f"{kind}-{name}", list(backward), info)


if __name__ == "__main__":
    sys.exit(main())
