"""A clock for tests of measured times: time passes only when a rank sleeps."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tritonddp import _device


class Clock:
    """Replaces the module ``time``, so that measured times do not depend on the machine's load.

    Each sleep takes slightly longer than requested, so that a test can distinguish steps.
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
