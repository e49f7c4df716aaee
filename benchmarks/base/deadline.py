"""Fewer rounds where there is less time, but never none.

`make bench` gives each of its parts a deadline, in :data:`VARIABLE`. A part gives each model, or
group, a share of the time that is left, and begins no round that would end too late, as far as
those before it tell. Without a deadline all rounds are taken.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

# By time.monotonic(), the clock of the machine, the same in all of its processes.
VARIABLE = "TRITONDDP_BENCH_DEADLINE"
LEAST_ROUNDS = 3
Name, Sample = TypeVar("Name"), TypeVar("Sample")


def deadline() -> float:
    """When this process should be done, by ``time.monotonic()``; infinity if nobody says."""
    return float(os.environ.get(VARIABLE, math.inf))


def shares(names: Sequence[Name]) -> Iterator[tuple[Name, float]]:
    """Each, and when it should be done: it gets its share of the time that is left."""
    for number, name in enumerate(names):
        yield name, until(deadline(), 1 / (len(names) - number))


def until(end: float, part: float) -> float:
    """The end of this part of the time left until ``end``."""
    now = time.monotonic()
    return now + part * max(0.0, end - now)


def interleaved(
    ways: Mapping[Name, Callable[[], Sample]], numbers: Iterable[int], seed: str = ""
) -> dict[Name, list[Sample]]:
    """In each round every way once, in an order shuffled anew, the same on all ranks.

    Args:
        ways: give a sample each, seconds for example.
        numbers: see :func:`rounds`; samples of negative ones are discarded.
    """
    samples: dict[Name, list[Sample]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(seed)
    for number in numbers:
        shuffle.shuffle(order)
        for name in order:
            sample = ways[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def rounds(
    most: int,
    end: float,
    least: int = LEAST_ROUNDS,
    discarded: int = 0,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[int]:
    """Numbers of rounds, negative for those to be discarded.

    Args:
        most: how many there are if there is time.
        end: a round that would end later does not begin, by the mean of those before it.
        least: how many there are in any case, unless ``most`` is less.
        discarded: how many come before.
        agreed: makes one answer of those of all ranks.
    """
    start = time.monotonic()
    for number in range(-discarded, most):
        if number >= least and end < math.inf:
            now = time.monotonic()
            if agreed(now + (now - start) / (number + discarded) > end):
                return
        yield number
