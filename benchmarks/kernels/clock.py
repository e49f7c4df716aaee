"""Additions to pytest-benchmark: cold caches, and the time of the device itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch

from benchmarks.kernels.inputs import Inputs
from benchmarks.step.traffic import launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_CPU_CACHE = 2**24  # bytes; an estimate of one core's share
_CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep; a slower clock only lengthens the sleep
_LONGEST_SLEEP = 20e-3  # seconds; longer host work is not waited for
_QUEUE = 512  # launches; the driver queues about twice as many before the host has to wait
_ROUNDS = 5


def seconds() -> float:
    """Wait until the device is idle, and return the time."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Rotation:
    """Sets of inputs, 2 to 8 of them, that together exceed the last-level cache."""

    def __init__(self, make: Callable[[], Inputs]) -> None:
        cache = _CPU_CACHE
        if DEVICE.type == "cuda":
            cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        self.sets = [make()]
        count = min(8, max(2, -(-3 * cache // (2 * self.sets[0].nbytes))))
        self.sets += [make() for _ in range(count - 1)]
        self._turns = cycle(self.sets)
        self._flush = torch.ones(cache, device=DEVICE)  # in fp32: four times the cache

    def next(self) -> tuple[tuple[Inputs], dict[str, Any]]:
        """Return the arguments of a call, none of which are in a cache."""
        self._flush.sum()  # only reads, so the call need not write back dirty lines
        return (next(self._turns),), {}

    def device_seconds(self, run: Callable[[Inputs], object], about: float) -> float:
        """Return the device's time for a call that takes about ``about`` seconds with its launches.

        It is measured between two events, after a sleep of the device that outlasts the host's
        work. Several calls share a pair of events, so that the events hardly matter for a small
        bucket, but no more calls than fit the queue of launches.
        """
        launched = launches(partial(run, self.sets[0])) or 1
        calls = self.sets[: max(1, _QUEUE // launched)]
        sleep = min(_LONGEST_SLEEP, 2 * len(calls) * about + 50e-6)
        times = []
        for _ in range(_ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self._flush.sum()
            torch.cuda._sleep(int(_CYCLES_PER_SECOND * sleep))
            start.record()
            for inputs in calls:
                run(inputs)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
        return median(times)
