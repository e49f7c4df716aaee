"""A clock for tests of what is measured: time passes only where a rank sleeps."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tritonddp import _device


class Clock:
    """Stands in for the module ``time``: its counter moves only where a rank sleeps.

    So the measured times are those of the test, however busy the machine is. No two steps take
    exactly as long, so that a test can tell one from the next.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._rng = random.Random(0)

    def perf_counter(self) -> float:
        return self._now

    def perf_counter_ns(self) -> int:
        return round(self._now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._now += seconds * self._rng.uniform(1.0, 1.0001)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextlib.contextmanager
def time_of_test() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(_device, "time", clock):
        yield clock
