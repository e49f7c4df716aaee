"""A clock for tests of what is measured: time passes only where a rank sleeps."""

import contextlib
import random
from collections.abc import Iterator
from unittest import mock

from tritonddp.features.metrics import step_times
from tritonddp.features.metrics.step_times import RunQueue


class Clock:
    """Stands in for the module ``time``: time passes only where a rank sleeps.

    So the measured times are those of the test, however busy the machine is. No two steps take
    exactly as long, so that a test can tell one from the next.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._rng = random.Random(0)

    def perf_counter(self) -> float:
        return self._now

    def thread_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self._now += seconds * self._rng.uniform(1.0, 1.0001)


@contextlib.contextmanager
def time_of_test() -> Iterator[Clock]:
    clock = Clock()
    with (
        mock.patch.object(step_times, "time", clock),
        mock.patch.object(RunQueue, "seconds", return_value=0.0),
    ):
        yield clock
