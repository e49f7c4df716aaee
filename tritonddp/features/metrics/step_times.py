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
from typing import Any, NamedTuple

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
            self._open()
        if self._file >= 0:
            # The file has: nanoseconds on a core, nanoseconds of waiting for one, time slices.
            try:
                waited = int(os.pread(self._file, 64, 0).split()[1])
            except OSError:  # that thread has ended, and this thread has the same identifier
                self._open()
            else:
                self._seconds = self._offset + waited * 1e-9
        return self._seconds

    def _open(self) -> None:
        """Open the file of the current thread, to read it from now on."""
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


class _Lap(NamedTuple):
    """The end of a part, at a point in time."""

    part: int
    now: Any  # seconds; on a GPU a Stamp
    waited: float = 0.0  # seconds in which this thread has waited for a core so far
    busy: float = 0.0  # seconds on a core so far


class StepClock:
    """Times steps of a module on ``device``, from a call of :meth:`end_step` on.

    On the CPU by the clock of the host; on a GPU by events on the current stream, for which the
    host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._queue = RunQueue()
        self._part = INPUT
        self._laps: list[_Lap] = []  # the end of the last step, and of each part since
        # The items and laps of steps whose events were not read yet.
        self._unread: deque[tuple[float, list[_Lap]]] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether the times of a measured step are not known yet."""
        return bool(self._unread)

    def lap(self, part: int, of: int | None = None) -> None:
        """``part`` begins now. The time since the last call belongs to the part ``of``.

        By default that is the part that began in the last call.
        """
        if self._laps:
            self._laps.append(self._lap(self._part if of is None else of))
        self._part = part

    def end_step(self, goes_on: bool, items: float = 1.0) -> StepTimes | None:
        """A step of so many items is over. Returns the last times that have become known, if any.

        With ``goes_on`` the next step is measured too.
        """
        self.lap(INPUT)
        begin = self._laps[-1:]
        if self._laps:
            self._unread.append((items, self._laps))
        self._laps = (begin or [self._lap(INPUT)]) if goes_on else []
        found = None
        while self._unread and _has_passed(self._unread[0][1][-1].now):
            found = self._unread.popleft()
        if found is None:
            return None
        items, laps = found
        times = [0.0] * (len(NAMES) + 1)
        for begun, ended in pairwise(laps):
            waited = ended.waited - begun.waited
            passed = _seconds(begun.now, ended.now) - waited
            times[ended.part] += passed
            times[CONTENDED] += waited
            if ended.part != EXPOSED:  # (another thread may have another clock)
                times[-1] += min(max(0.0, ended.busy - begun.busy), passed)
        return StepTimes(*(each * 1e3 for each in times))._replace(items=items)

    def drop_step(self) -> None:
        """Forget the time since the last step: it was no whole step."""
        self._part, self._laps = INPUT, []

    def _lap(self, part: int) -> _Lap:
        if self._device is not None:
            return _Lap(part, Stamp(self._device))
        return _Lap(part, time.perf_counter(), self._queue.seconds(), time.thread_time())


def _has_passed(now: Any) -> bool:
    return not isinstance(now, Stamp) or now.has_passed()


def _seconds(begin: Any, end: Any) -> float:
    return begin.seconds_to(end) if isinstance(begin, Stamp) else end - begin
