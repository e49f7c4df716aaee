"""Finds the rank that the others wait for, from the times of all ranks.

The *lateness* of a rank in a step is how much later than the median of the other ranks it is ready,
as a share of the step. It varies from step to step. A *window* is a number of last steps: 3, 4, or
more. A rank is slow if in some window its lateness (the least of a window of up to 4 steps, the
median of a longer one) is

1. large enough to matter (3.5 % of a step),
2. far above the noise: the noise of one step divided by the root of the number of steps, and
3. twice as large as windows of that size have ever differed by while no rank was slow.

Where steps vary little, three steps are enough; otherwise it takes longer.

A core may be slower for a tenth of a second because another process shares it, which is no lasting
problem. So windows below 16 steps count only if the rank was late without being busy (it sleeps, or
waits for data or a lock), or if its lateness is large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

from tritonddp.features.metrics.step_times import NAMES, StepTimes

PARTS = NAMES[:3]  # the parts of a rank's own time

# Shares of a step. A rank that is 5 % late should be named; its measured lateness may be less.
_LEAST = 0.035
_OVER = 0.02  # below this a rank is no longer slow
_QUIET = 0.004  # least noise that is assumed

_FIRST = 6  # steps before any rank is named
_LONG = 16  # steps of a window from which on the rank may also have been busy
_LARGE = 0.25  # lateness from which on it may have been busy in shorter windows too
_FEW = 4  # up to so many steps of a window each has to be late; of longer ones the median
_WINDOWS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # steps
_SHORT = _WINDOWS[:2]
_SIGMAS, _MARGIN = 6.0, 2.0  # factors of conditions 2 and 3
_HISTORY = 256  # steps kept from times when no rank was slow
_KEPT = 16  # steps for which values computed from the whole history are kept
_EVERY = 4  # longer windows are looked at in one step of so many


class Straggler(NamedTuple):
    """A rank that is slower than the others."""

    rank: int
    part: str  # of the step: "input", "forward" or "backward"
    share: float  # its lateness: later than the median of the others by this share of a step


class Stragglers:
    """Looks for a slow rank among ``size`` ranks.

    Attributes:
        slowest: the rank that the others wait for; ``None`` if no rank is slow.
    """

    def __init__(self, size: int) -> None:
        self.slowest: Straggler | None = None
        self._steps = 0
        self._times: deque[Sequence[StepTimes]] = deque(maxlen=_WINDOWS[-1])
        # Lateness by rank: in the last steps, in steps while no rank was slow, and the part of the
        # lateness in which the rank was not busy.
        self._late = [deque[float](maxlen=_WINDOWS[-1]) for _ in range(size)]
        self._calm = [deque[float](maxlen=_HISTORY) for _ in range(size)]
        self._idle = [deque[float](maxlen=_LONG) for _ in range(size)]
        self._noise = [_QUIET] * size
        self._turn = 0  # the rank whose noise was computed last
        # By rank and window: the step in which the spread was computed, and the spread.
        self._spreads: dict[tuple[int, int], tuple[int, float]] = {}

    def step(self, ranks: Sequence[StepTimes]) -> Straggler | None:
        """Add the times of all ranks in one more step; returns :attr:`slowest`."""
        if len(ranks) < 2:
            return None
        self._steps += 1
        self._times.append(ranks)
        length = sum(each.total for each in ranks) / len(ranks) or 1.0
        for rank, late in enumerate(_lateness([each.own for each in ranks])):
            self._late[rank].append(late / length)
            if self.slowest is None:
                self._calm[rank].append(late / length)
        for rank, late in enumerate(_lateness([each.idle for each in ranks])):
            self._idle[rank].append(late / length)
        if self._steps == _FIRST:
            self._noise = list(map(_noise, self._calm))
        elif self._steps % (_EVERY if self._steps < _KEPT * _EVERY else _KEPT) == 0:
            rank = self._turn = (self._turn + 1) % len(ranks)
            self._noise[rank] = _noise(self._calm[rank])
        if self._steps >= _FIRST:
            self._look()
        return self.slowest

    def _look(self) -> None:
        """Update :attr:`slowest`."""
        slowest = self.slowest
        if slowest is not None:
            late = _median(list(self._late[slowest.rank])[-_WINDOWS[0] :])
            slowest = self.slowest = None if late < _OVER else Straggler(*slowest[:2], late)
            if slowest is None:  # clear the windows, or some would still contain its slow steps
                for steps in (*self._late, *self._idle):
                    steps.clear()
                return
        most = 0.0 if slowest is None else slowest.share
        looks_far = self._steps % _EVERY == 0
        for rank, steps in enumerate(self._late):
            if len(steps) < _WINDOWS[0] or (slowest is not None and rank == slowest.rank):
                continue
            is_late = steps[-1] >= _LEAST and steps[-2] >= _LEAST
            if not (looks_far or is_late):
                continue
            recent = list(steps)
            if not is_late and _median(recent[-_FIRST:]) < _LEAST:  # not late in the last steps
                continue
            window, late = self._window(rank, recent, _WINDOWS if looks_far else _SHORT)
            if window and late > most:
                most, self.slowest = late, Straggler(rank, self._part(rank, window), late)

    def _window(self, rank: int, late: list[float], windows: Iterable[int]) -> tuple[int, float]:
        """The window in which ``rank`` is slow, and its lateness there; zeros if it is not slow."""
        for window in windows:
            if window > len(late):
                break
            value = _typical(late, window)
            noise = max(self._noise[rank], _median(self._noise))
            noise *= 1 + _FIRST / len(self._calm[rank])  # a few steps may be equal by chance
            least = max(_LEAST, _SIGMAS * noise / sqrt(window))
            if (
                window < _LONG
                and value < _LARGE
                and _typical(list(self._idle[rank]), window) < value / 2
            ):
                continue
            if value >= least and value >= _MARGIN * self._spread(rank, window):
                return window, value
        return 0, 0.0

    def _spread(self, rank: int, window: int) -> float:
        """How much the lateness in such windows has varied while no rank was slow."""
        at, spread = self._spreads.get((rank, window), (-_KEPT, 0.0))
        if self._steps - at < _KEPT:
            return spread
        calm = list(self._calm[rank])
        if self.slowest is None:
            calm = calm[:-window]
        values = [_typical(calm[:end], window) for end in range(window, len(calm) + 1)]
        usual = _median(values) if values else 0.0
        spread = max((abs(value - usual) for value in values), default=0.0)
        self._spreads[rank, window] = self._steps, spread
        return spread

    def _part(self, rank: int, window: int) -> str:
        """The part of the step in which the lateness of ``rank`` is greatest."""
        steps = list(self._times)[-window:]
        late = [
            _median([_lateness([times[part] for times in ranks])[rank] for ranks in steps])
            for part in range(len(PARTS))
        ]
        return PARTS[late.index(max(late))]


def _lateness(times: list[float]) -> list[float]:
    """How much later each rank is than the median of the others (the larger of two middle ones)."""
    middle = (len(times) - 1) // 2
    lower, upper = sorted(times)[middle : middle + 2]
    return [each - lower if each > lower else each - upper for each in times]


def _typical(late: list[float], window: int) -> float:
    """The lateness in the last ``window`` steps: the least in a short window, else the median."""
    last = late[-window:]
    return min(last) if window <= _FEW else _median(last)


def _noise(late: Iterable[float]) -> float:
    """Standard deviation of one step, estimated by the median absolute deviation."""
    values = list(late)
    middle = _median(values)
    return max(_QUIET, 1.4826 * _median([abs(each - middle) for each in values]))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
