"""Take fewer rounds if there is less time, but always at least one.

`make bench` gives each of its parts a deadline, in :data:`VARIABLE`. A part gives each model or
group a share of the remaining time, and starts no round that would probably end too late, judging
by the previous rounds. Without a deadline, it runs all rounds.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

# In seconds of time.monotonic(), which all processes of a machine share.
VARIABLE = "TRITONDDP_BENCH_DEADLINE"
LEAST_ROUNDS = 3
Name, Sample = TypeVar("Name"), TypeVar("Sample")


def deadline() -> float:
    """Return the deadline of this process, by ``time.monotonic()``; infinity if there is none."""
    return float(os.environ.get(VARIABLE, math.inf))


def shares(names: Sequence[Name]) -> Iterator[tuple[Name, float]]:
    """Yield each name with its deadline, which gives it a share of the remaining time."""
    for number, name in enumerate(names):
        yield name, until(deadline(), 1 / (len(names) - number))


def until(end: float, part: float) -> float:
    """Return the end of this fraction of the time left until ``end``."""
    now = time.monotonic()
    return now + part * max(0.0, end - now)


def interleaved(
    ways: Mapping[Name, Callable[[], Sample]], numbers: Iterable[int], seed: str = ""
) -> dict[Name, list[Sample]]:
    """Call all functions once per round, in a shuffled order that is the same on all ranks.

    Args:
        ways: functions that return one sample each, for example seconds.
        numbers: see :func:`rounds`; samples of negative rounds are discarded.
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
    """Yield the numbers of rounds; rounds to discard have negative numbers.

    Args:
        most: number of rounds if there is enough time.
        end: a round does not start if it would end later, by the mean of the previous rounds.
        least: minimum number of rounds, unless ``most`` is smaller.
        discarded: number of rounds to discard at the beginning.
        agreed: combines the answers of all ranks into one.
    """
    start = time.monotonic()
    for number in range(-discarded, most):
        if number >= least and end < math.inf:
            now = time.monotonic()
            if agreed(now + (now - start) / (number + discarded) > end):
                return
        yield number
