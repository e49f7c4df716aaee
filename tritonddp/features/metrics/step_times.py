"""How long this rank spends in the parts of a step, from the end of one reduction to the next.

::

    | input            | forward         | backward          | exposed              | input ..
    end of reduction   forward begins    backward begins     gradients are there    end of reduction

All ranks end a reduction together. The time from there until a rank has its last gradient is the
rank's *own* time. ``exposed`` is not: the rank waits for other ranks. The time that a forward waits
for buffers belongs to ``exposed`` too. If several backwards are accumulated, each part is a sum.

On the CPU the time in which this thread was ready to run but had no core is left out of all parts,
and counted as ``contended``. With more work than cores it can be as long as a step, and affects a
different rank each time.
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
    """The parts of one step on one rank, in milliseconds."""

    input: float = 0.0  # data, optimizer, and all that is in no other part
    forward: float = 0.0  # with the loss
    backward: float = 0.0  # until the autograd engine has finished
    exposed: float = 0.0  # synchronisation that did not overlap with compute
    contended: float = 0.0  # waiting for a core, during any of these parts
    busy: float = 0.0  # on a core, during the rank's own time; no further part of the step
    items: float = 1.0  # of its gradients, see ``weighted(n)``

    @property
    def own(self) -> float:
        """Time in which this rank did not wait for other ranks."""
        return self.input + self.forward + self.backward

    @property
    def total(self) -> float:
        """Length of the step."""
        return sum(self[: len(NAMES)])

    @property
    def idle(self) -> float:
        """Own time neither on a core nor waiting for one: in sleep, I/O or a lock."""
        return self.own - self.busy


NAMES = ("input", "forward", "backward", "exposed", "contended")
INPUT, FORWARD, BACKWARD, EXPOSED, CONTENDED = range(len(NAMES))


class RunQueue:
    """How long a thread has waited for a core. Linux counts it; elsewhere this is always 0."""

    def __init__(self) -> None:
        self._thread = -1  # the thread that the file is about
        self._file = -1
        self._close: Callable[[], object] = int
        self._offset = self._seconds = 0.0

    def seconds(self) -> float:
        """Seconds so far, of the thread that calls.

        When another thread calls, counting goes on with the waits of that thread.
        """
        if self._thread != threading.get_ident():
            self._follow()
        if self._file >= 0:
            # The file has: nanoseconds on a core, nanoseconds of waiting for one, time slices.
            try:
                waited = int(os.pread(self._file, 64, 0).split()[1])
            except OSError:  # that thread has ended, and this thread has the same identifier
                self._follow()
            else:
                self._seconds = self._offset + waited * 1e-9
        return self._seconds

    def _follow(self) -> None:
        """Read the file of the current thread from now on."""
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
    """Times steps on the CPU, by the clock of the host, from a call of :meth:`end_step` on.

    Attributes:
        is_behind: the times of a measured step are not known yet.
    """

    is_behind = False

    def __init__(self) -> None:
        self._queue = RunQueue()
        self._part = INPUT
        self._last: float | None = None
        self._last_wait = self._last_busy = 0.0
        self._times = [0.0] * (len(NAMES) + 1)

    def lap(self, part: int, of: int | None = None) -> None:
        """``part`` begins now. The time since the last call belongs to the part ``of``.

        By default that is the part that began in the last call.
        """
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

    def end_step(self, goes_on: bool, items: float = 1.0) -> StepTimes | None:
        """A step of so many items is over. Returns the last times that have become known, if any.

        With ``goes_on`` the next step is measured too.
        """
        was_measured = self._last is not None
        self.lap(INPUT)
        times, self._times = self._times, [0.0] * len(self._times)
        if not goes_on:
            self._last = None
        elif not was_measured:
            self._last, self._last_wait = time.perf_counter(), self._queue.seconds()
            self._last_busy = time.thread_time()
        if not was_measured:
            return None
        return StepTimes(*(each * 1e3 for each in times))._replace(items=items)

    def drop_step(self) -> None:
        """Forget the time since the last step: it was no whole step."""
        self._part, self._last = INPUT, None
        self._times = [0.0] * len(self._times)


class DeviceClock:
    """Times steps on a GPU, by events on the current stream. The host does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._part = INPUT
        self._laps: list[tuple[int, Stamp]] = []  # the end of the last step, and of each part since
        # The items and laps of steps whose events were not read yet.
        self._over: deque[tuple[float, list[tuple[int, Stamp]]]] = deque()

    @property
    def is_behind(self) -> bool:
        """See :class:`HostClock`."""
        return bool(self._over)

    def lap(self, part: int, of: int | None = None) -> None:
        """See :meth:`HostClock.lap`."""
        if self._laps:
            self._laps.append((self._part if of is None else of, Stamp(self._device)))
        self._part = part

    def end_step(self, goes_on: bool, items: float = 1.0) -> StepTimes | None:
        """See :meth:`HostClock.end_step`."""
        self.lap(INPUT)
        if self._laps:
            self._over.append((items, self._laps))
        self._laps = [(INPUT, Stamp(self._device))] if goes_on else []
        found = None
        while self._over and self._over[0][1][-1][1].has_passed():
            found = self._over.popleft()
        if found is None:
            return None
        items, laps = found
        times = [0.0] * len(NAMES)
        for (_, begin), (part, end) in pairwise(laps):
            times[part] += begin.seconds_to(end) * 1e3
        return StepTimes(*times)._replace(items=items)

    def drop_step(self) -> None:
        """See :meth:`HostClock.drop_step`."""
        self._part, self._laps = INPUT, []


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock for a module on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
