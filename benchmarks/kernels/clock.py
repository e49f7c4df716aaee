"""What pytest-benchmark lacks: cold caches, a clock that waits for the device, and its own time."""

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

_CPU_CACHE = 2**24  # bytes; a guess at a core's share
_CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep; slower clocks only lengthen the sleep
_LONGEST_SLEEP = 20e-3  # seconds; the host's work of more is not waited for
_QUEUE = 512  # launches; the driver queues about twice as many before the host has to wait
_ROUNDS = 5


def seconds() -> float:
    """The time at which all that was given to the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Rotation:
    """Sets of inputs that together exceed the last-level cache, at least 2 and at most 8."""

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
        """Arguments of a call, which finds nothing of them in a cache."""
        self._flush.sum()  # reads only: no dirty lines that the call would have to write back
        return (next(self._turns),), {}

    def device_seconds(self, run: Callable[[Inputs], object], about: float) -> float:
        """The device's time for a call that takes ``about`` so many seconds with its launches.

        Between two events, behind a sleep of the device that outlasts the host's work. Several
        calls share a pair of events, so that these count for little in a small bucket, but no more
        than fit the queue of launches.
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
