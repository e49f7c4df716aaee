"""How long this rank spends in the parts of a step, from the end of one reduction to the next.

::

    | input            | forward         | backward          | exposed              | input ..
    end of reduction   forward begins    backward begins     gradients are there    end of reduction

All ranks end a reduction together, and what a rank does from there to its last gradient is its own
time. ``exposed`` is not: it waits for others. What a forward waits for buffers is counted there.
Where several backwards are accumulated, each part is the sum of all.

On the CPU none of them holds the time in which this thread was ready to run and had no core: with
more work than cores that is as long as a step, and falls on another rank each time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from tritonddp._device import Stamp


class StepTimes(NamedTuple):
    """Milliseconds of one step on one rank."""

    input: float = 0.0  # data, optimizer, and all that is none of the rest
    forward: float = 0.0  # with the loss
    backward: float = 0.0  # until the engine is through
    exposed: float = 0.0  # synchronisation that nothing hid
    contended: float = 0.0  # waiting for a core, in any of these
    busy: float = 0.0  # of its own time: on a core. Not a part of a step

    @property
    def own(self) -> float:
        """In which no other rank was waited for."""
        return self.input + self.forward + self.backward

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(self[: len(NAMES)])

    @property
    def idle(self) -> float:
        """Of its own time: neither on a core nor waiting for one, as in sleep, I/O or a lock."""
        return self.own - self.busy


NAMES = ("input", "forward", "backward", "exposed", "contended")
INPUT, FORWARD, BACKWARD, EXPOSED, CONTENDED = range(len(NAMES))


class RunQueue:
    """How long a thread has waited for a core, by Linux; elsewhere it never has."""

    def __init__(self) -> None:
        self._thread = -1  # of which the file tells
        self._file = -1
        self._close: Callable[[], object] = int
        self._offset = self._seconds = 0.0

    def seconds(self) -> float:
        """Of the threads that have asked so far, each since it asked first after another one."""
        if self._thread != threading.get_ident():
            self._follow()
        if self._file >= 0:
            # The second of: nanoseconds on a core, nanoseconds that it waited for one, turns.
            try:
                waited = int(os.pread(self._file, 64, 0).split()[1])
            except OSError:  # that thread has ended, and this one has got its number
                self._follow()
            else:
                self._seconds = self._offset + waited * 1e-9
        return self._seconds

    def _follow(self) -> None:
        """Tell of the current thread from now on."""
        self._close()
        self._thread, self._file, self._close = threading.get_ident(), -1, int
        try:
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._file)
            waited = int(os.pread(self._file, 64, 0).split()[1])
        except (AttributeError, OSError, ValueError, IndexError):  # no Linux, or a sandbox
            self._close()
            self._file, self._close, waited = -1, int, 0
        self._offset = self._seconds - waited * 1e-9


class HostClock:
    """On the CPU, by the clock of the host. Measures from the end of the first step on."""

    def __init__(self) -> None:
        self._queue = RunQueue()
        self._part = INPUT
        self._last: float | None = None
        self._last_wait = self._last_busy = 0.0
        self._times = [0.0] * (len(NAMES) + 1)

    def lap(self, part: int, of: int | None = None) -> None:
        """``part`` begins now. What has passed since the last call was another one: ``of``."""
        if self._last is not None:
            now, wait, busy = time.perf_counter(), self._queue.seconds(), time.thread_time()
            waited, ended = wait - self._last_wait, self._part if of is None else of
            passed = now - self._last - waited
            self._times[ended] += passed
            self._times[CONTENDED] += waited
            if ended != EXPOSED:  # (another thread may have another clock)
                self._times[-1] += min(max(0.0, busy - self._last_busy), passed)
            self._last, self._last_wait, self._last_busy = now, wait, busy
        self._part = part

    def end_step(self) -> StepTimes | None:
        """A step is over. Returns the times of the last one that are known, if any are."""
        was_measured = self._last is not None
        self.lap(INPUT)
        times, self._times = self._times, [0.0] * len(self._times)
        if not was_measured:
            self._last, self._last_wait = time.perf_counter(), self._queue.seconds()
            self._last_busy = time.thread_time()
        return StepTimes(*(each * 1e3 for each in times)) if was_measured else None

    def drop_step(self) -> None:
        """What has passed is no step."""
        self._part, self._last = INPUT, None
        self._times = [0.0] * len(self._times)


class DeviceClock:
    """On a GPU, by events on the current stream, which are read when it has come to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._part = INPUT
        self._laps: list[tuple[int, Stamp]] = []  # the end of the last step, and of each part since
        self._over: deque[list[tuple[int, Stamp]]] = deque()  # steps that are not read yet

    def lap(self, part: int, of: int | None = None) -> None:
        """See :meth:`HostClock.lap`."""
        if self._laps:
            self._laps.append((self._part if of is None else of, Stamp(self._device)))
        self._part = part

    def end_step(self) -> StepTimes | None:
        """See :meth:`HostClock.end_step`."""
        self.lap(INPUT)
        if self._laps:
            self._over.append(self._laps)
        self._laps = [(INPUT, Stamp(self._device))]
        found = None
        while self._over and self._over[0][-1][1].has_passed():
            found = self._over.popleft()
        if found is None:
            return None
        times = [0.0] * len(NAMES)
        for (_, begin), (part, end) in pairwise(found):
            times[part] += begin.seconds_to(end) * 1e3
        return StepTimes(*times)

    def drop_step(self) -> None:
        """See :meth:`HostClock.drop_step`."""
        self._part, self._laps = INPUT, []


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Of a module on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
