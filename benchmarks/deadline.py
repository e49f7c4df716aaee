"""Fewer rounds where there is less time, but never none.

`make bench` gives each of its parts a deadline, in :data:`VARIABLE`. A part gives each model, or
group, a share of the time that is left, and begins no round that would end too late, as far as
those before it tell. Without a deadline all rounds are taken.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

# By time.monotonic(), the clock of the machine, the same in all of its processes.
VARIABLE = "TRITONDDP_BENCH_DEADLINE"
LEAST_ROUNDS = 3


def deadline() -> float:
    """When this process should be done, by ``time.monotonic()``; infinity if nobody says."""
    return float(os.environ.get(VARIABLE, math.inf))


def share(part: float) -> float:
    """The end of this part of the time left, by the same clock."""
    return until(deadline(), part)


def until(end: float, part: float) -> float:
    """The end of this part of the time left until ``end``."""
    now = time.monotonic()
    return now + part * max(0.0, end - now)


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
