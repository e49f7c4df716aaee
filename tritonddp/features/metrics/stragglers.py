"""Finds the rank that the others wait for, from the times of all ranks in each step.

The *lateness* of a rank in a step is the time that it needs longer than the median of the other
ranks, as a share of the step. It varies from step to step. A *window* is a number of last measured
steps, from 3 to 64. A rank is slow if in some window its lateness (the least in a window of up to 4
steps, the median in a longer one) is

1. large enough to matter (3.5 % of a step, and half a millisecond),
2. far above the noise: the noise of one step divided by the root of the number of steps, and
3. twice as large as windows of that length have ever varied by while no rank was slow.

If steps vary little, three steps are enough; otherwise it takes longer.

This is done for two kinds of time. *Idle* time, in which the rank was neither on a core nor waiting
for one (it sleeps, or waits for data or a lock), hardly varies, so that a little of it is found
soon. The rank's whole *own* time varies more: a core may be slower for a tenth of a second, since
another process shares it. So for own time a window of less than 16 steps counts only if the
lateness is large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt
from statistics import median_high
from typing import NamedTuple

from tritonddp.features.metrics.step_times import NAMES, StepTimes

PARTS = NAMES[:3]  # the parts of a rank's own time

# Shares of a step. A rank that is 5 % late should be named; its measured lateness may be less.
_LEAST = 0.035
_LEAST_MS = 0.5  # in steps of a few milliseconds less than that is chance
_OVER = 0.6  # below this part of the least lateness a rank is no longer slow
_QUIET = 0.004  # least noise that is assumed

_FIRST = 6  # steps before any rank is named
_LONG = 16  # least steps of a window of own time, unless the lateness is large
_LARGE = 0.25  # lateness that is large in this sense
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
    share: float  # its lateness: a share of a step


class Stragglers:
    """Looks for a slow rank among ``size`` ranks.

    Attributes:
        slowest: the rank that the others wait for; ``None`` if no rank is slow.
    """

    def __init__(self, size: int) -> None:
        self.slowest: Straggler | None = None
        self._steps = 0
        self._times: deque[Sequence[StepTimes]] = deque(maxlen=_WINDOWS[-1])
        self._lengths: deque[float] = deque(maxlen=_WINDOWS[-1])  # of these steps, in milliseconds
        self._least = _LEAST  # the least lateness that matters
        self._idle, self._own = _Lateness(size), _Lateness(size)

    def step(self, ranks: Sequence[StepTimes]) -> Straggler | None:
        """Add the times of all ranks in one more step; returns :attr:`slowest`."""
        if len(ranks) < 2:
            return None
        self._steps += 1
        self._times.append(ranks)
        length = sum(each.total for each in ranks) / len(ranks) or 1.0
        is_calm = self.slowest is None
        self._lengths.append(length)
        if self._steps % _EVERY == 1:  # (one step may be long: a checkpoint, a validation)
            self._least = max(_LEAST, _LEAST_MS / median_high(self._lengths))
        self._idle.step([each.idle / length for each in ranks], is_calm)
        self._own.step([each.own / length for each in ranks], is_calm)
        if self._steps >= _FIRST:
            self._look()
        return self.slowest

    def _look(self) -> None:
        """Update :attr:`slowest`."""
        slowest = self.slowest
        if slowest is not None:
            late = median_high(self._own.last(slowest.rank, _WINDOWS[0]))
            is_over = late < _OVER * self._least
            slowest = self.slowest = None if is_over else Straggler(*slowest[:2], late)
            if slowest is None:  # clear the windows, or some would still contain its slow steps
                self._idle.forget()
                self._own.forget()
                return
        most = 0.0 if slowest is None else slowest.share
        for rank in range(len(self._times[-1])):
            if slowest is not None and rank == slowest.rank:
                continue
            window, late = self._window(rank)
            if window and late > most:
                most, self.slowest = late, Straggler(rank, self._part(rank, window), late)

    def _window(self, rank: int) -> tuple[int, float]:
        """The window in which ``rank`` is slow, and its lateness there; zeros if it is not slow."""
        looks_far, least = self._steps % _EVERY == 0, self._least
        window = self._idle.window(rank, looks_far, least)
        if window and (late := self._own.typical(rank, window)) >= _OVER * least:
            return window, late
        window = self._own.window(rank, looks_far, least)
        if window and window < _LONG and self._own.typical(rank, window) < _LARGE:
            window = self._own.window(rank, looks_far, least, _LONG)
        return (window, self._own.typical(rank, window)) if window else (0, 0.0)

    def _part(self, rank: int, window: int) -> str:
        """The part of the step in which the lateness of ``rank`` is greatest."""
        steps = list(self._times)[-window:]
        late = [
            median_high([_lateness([times[part] for times in ranks])[rank] for ranks in steps])
            for part in range(len(PARTS))
        ]
        return PARTS[late.index(max(late))]


class _Lateness:
    """The lateness of all ranks in one kind of time: idle or own."""

    def __init__(self, size: int) -> None:
        # Lateness by rank: in the last steps, and in steps while no rank was slow.
        self._late = [deque[float](maxlen=_WINDOWS[-1]) for _ in range(size)]
        self._calm = [deque[float](maxlen=_HISTORY) for _ in range(size)]
        self._is_calm = True
        self._steps = 0
        self._noise = [_QUIET] * size
        self._turn = 0  # the rank whose noise was computed last
        # By rank and window: the step in which the spread was computed, and the spread.
        self._spreads: dict[tuple[int, int], tuple[int, float]] = {}

    def step(self, shares: list[float], is_calm: bool) -> None:
        """Add one more step: the share of it that each rank took; ``is_calm``: no rank is slow."""
        self._steps += 1
        self._is_calm = is_calm
        for rank, late in enumerate(_lateness(shares)):
            self._late[rank].append(late)
            if is_calm:
                self._calm[rank].append(late)
        if self._steps == _FIRST:
            self._noise = list(map(_noise, self._calm))
        elif self._steps % (_EVERY if self._steps < _KEPT * _EVERY else _KEPT) == 0:
            rank = self._turn = (self._turn + 1) % len(shares)
            self._noise[rank] = _noise(self._calm[rank])

    def forget(self) -> None:
        """Clear the last steps."""
        for each in self._late:
            each.clear()

    def last(self, rank: int, window: int) -> list[float]:
        """The lateness of ``rank`` in each of the last ``window`` steps."""
        return list(self._late[rank])[-window:]

    def typical(self, rank: int, window: int) -> float:
        """The lateness of ``rank`` in this window: the least if it is short, else the median."""
        return _typical(self.last(rank, window))

    def window(self, rank: int, looks_far: bool, least: float, least_steps: int = 0) -> int:
        """The steps of a window in which ``rank`` is slow; 0 if there is none.

        Args:
            rank: a rank of the group.
            looks_far: also look at long windows.
            least: the least lateness that matters.
            least_steps: the least number of steps of a window.
        """
        late = self._late[rank]
        if len(late) < _WINDOWS[0]:
            return 0
        is_late = late[-1] >= least and late[-2] >= least
        if not is_late and not (looks_far and median_high(self.last(rank, _FIRST)) >= least):
            return 0
        noise = max(self._noise[rank], median_high(self._noise))
        noise *= 1 + _FIRST / len(self._calm[rank])  # a few steps may be equal by chance
        for window in _WINDOWS if looks_far else _SHORT:
            if window > len(late):
                break
            if window < least_steps:
                continue
            value = self.typical(rank, window)
            is_beyond_noise = value >= max(least, _SIGMAS * noise / sqrt(window))
            if is_beyond_noise and value >= _MARGIN * self._spread(rank, window):
                return window
        return 0

    def _spread(self, rank: int, window: int) -> float:
        """How much the lateness in such windows has varied while no rank was slow."""
        at, spread = self._spreads.get((rank, window), (-_KEPT, 0.0))
        if self._steps - at < _KEPT:
            return spread
        calm = list(self._calm[rank])
        if self._is_calm:
            calm = calm[:-window]
        values = [_typical(calm[end - window : end]) for end in range(window, len(calm) + 1)]
        usual = median_high(values) if values else 0.0
        spread = max((abs(value - usual) for value in values), default=0.0)
        self._spreads[rank, window] = self._steps, spread
        return spread


def _lateness(times: list[float]) -> list[float]:
    """How much later each rank is than the median of the others (the larger of two middle ones)."""
    middle = (len(times) - 1) // 2
    lower, upper = sorted(times)[middle : middle + 2]
    return [each - lower if each > lower else each - upper for each in times]


def _typical(late: list[float]) -> float:
    """The least of a few steps, else the median."""
    return min(late) if len(late) <= _FEW else median_high(late)


def _noise(late: Sequence[float]) -> float:
    """Standard deviation of one step, estimated by the median absolute deviation."""
    middle = median_high(late)
    return max(_QUIET, 1.4826 * median_high(abs(each - middle) for each in late))
