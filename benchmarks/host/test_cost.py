"""What DDP costs the host: per parameter, per bucket and per step, stock beside ours.

    pytest benchmarks/host --benchmark-only [--rounds 40] [--benchmark-json FILE]

A world of one, so that nothing is sent; one thread on the CPU, or a GPU over NCCL, of which only
the host's time counts. All configurations run in shuffled rounds with a bare model, and each figure
is the median over rounds of a difference within a round. A second bare model, *unwrapped*, shows
the resolution.

parameter   1,000 parameters of 64 elements in one bucket: the backward beyond the bare one, and of
            it what lies between the gradients (*hook*), per parameter. Stock's default copies
            gradients there, the others when the bucket is full.
bucket      the same parameters in 20 buckets of 50: from the last gradient of a bucket to the next,
            beyond the same within a bucket (*launch*: flatten 50 gradients, issue the collective);
            and the whole backward beyond that with one bucket, per further bucket.
step        one parameter, one bucket: forward and backward beyond the bare ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import replay
import torch
from configurations import UNWRAPPED, Configuration, families
from deadline import share
from paired import Spread
from subjects import Subject, Times, time_rounds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 40

CONFIGURATIONS = [
    UNWRAPPED,
    *(each for family in families() for each in family.members if each is not family.again),
]
BARE = Configuration("bare", None)
PARAMETERS, PER_BUCKET = 1000, 50
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

timed = pytest.mark.benchmark(timer=replay.clock)
each_configuration = pytest.mark.parametrize("name", [each.name for each in CONFIGURATIONS])


@functools.cache  # the first test that asks measures for all
def many_parameters(rounds: int) -> Rounds:
    """1,000 parameters, in one bucket and in 20; most of the time is for them."""
    end = share(3 / 4)
    subjects = {}
    for each in (BARE, *CONFIGURATIONS):
        subjects[each.name, 1] = Subject(each, DEVICE, PARAMETERS, PARAMETERS, SPAN)
        subjects[each.name, BUCKETS] = Subject(each, DEVICE, PARAMETERS, PER_BUCKET, NEIGHBOURS)
    return time_rounds(subjects, DEVICE, rounds, end)


@functools.cache
def one_parameter(rounds: int) -> Rounds:
    """One parameter in one bucket."""
    subjects = {(each.name, 1): Subject(each, DEVICE, 1, 1) for each in (BARE, *CONFIGURATIONS)}
    return time_rounds(subjects, DEVICE, rounds, share(1))


@timed
@each_configuration
def test_parameter(benchmark: Any, name: str, pytestconfig: Any) -> None:
    rounds = many_parameters(pytestconfig.option.rounds or ROUNDS)
    own, bare = _backwards(rounds[name, 1]), _backwards(rounds[BARE.name, 1])
    own_span = [times.nanoseconds(0, 1) for times in rounds[name, 1]]
    bare_span = [times.nanoseconds(0, 1) for times in rounds[BARE.name, 1]]
    _report(
        benchmark,
        "parameter",
        name,
        own,
        seconds={"bare": bare, "span": own_span, "bare span": bare_span},
        us={
            "all": _beyond(own, bare, per=PARAMETERS),
            "hook": _beyond(own_span, bare_span, per=SPAN[1] - SPAN[0]),
        },
    )


@timed
@each_configuration
def test_bucket(benchmark: Any, name: str, pytestconfig: Any) -> None:
    rounds = many_parameters(pytestconfig.option.rounds or ROUNDS)
    many, one = _backwards(rounds[name, BUCKETS]), _backwards(rounds[name, 1])
    within = [_median_gap(times, first=0) for times in rounds[name, BUCKETS]]
    between = [_median_gap(times, first=2) for times in rounds[name, BUCKETS]]
    _report(
        benchmark,
        "bucket",
        name,
        many,
        seconds={"one bucket": one, "within": within, "between": between},
        us={"all": _beyond(many, one, per=BUCKETS - 1), "launch": _beyond(between, within)},
    )


@timed
@each_configuration
def test_step(benchmark: Any, name: str, pytestconfig: Any) -> None:
    rounds = one_parameter(pytestconfig.option.rounds or ROUNDS)
    own, bare = _backwards(rounds[name, 1]), _backwards(rounds[BARE.name, 1])
    own_forward = [times.forward for times in rounds[name, 1]]
    bare_forward = [times.forward for times in rounds[BARE.name, 1]]
    _report(
        benchmark,
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


def _report(
    benchmark: Any,
    kind: str,
    name: str,
    backward: Sequence[float],
    seconds: dict[str, list[float]],
    us: dict[str, Spread],
) -> None:
    """Fill pytest-benchmark's row: ``backward`` in seconds, and what is made of it."""
    benchmark.group = kind
    replay.replay(benchmark, backward)
    benchmark.extra_info.update(
        kind=kind,
        configuration=name,
        device=DEVICE.type,
        us={column: asdict(spread) for column, spread in us.items()},
        seconds=seconds,
    )
